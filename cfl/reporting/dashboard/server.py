"""Workspace and report on a wandb server: made, or put in the place of those of the same name."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import wandb
import wandb_workspaces.workspaces as workspaces

VIEW = "cflcompare"
"""Name of the workspace's view in its address (``?nw=``): the same each time, so that it is found again."""


def publish(workspace: Any, report: Any) -> tuple[str, str]:
    """Save both; the addresses of workspace and report.

    The report goes first, because saving it makes a project that is not there yet. A report is the same one if it has
    the same title.

    Raises:
        wandb.errors.Error: nobody is logged in, or the server refuses.
    """
    report.id = _report_with(report.entity, report.project, report.title)
    report.save()
    held = _view(workspace.entity, workspace.project)
    workspace._internal_name = f"nw-{VIEW}-v"
    if held is not None:
        workspace._internal_id = held._internal_id
    workspace.save()
    return workspace.url, report.url


def default_entity() -> str:
    """Whose project it is where nobody is named: the server knows who is logged in."""
    found: str = wandb.Api().default_entity or ""
    return found


def _report_with(entity: str, project: str, title: str) -> str:
    try:
        for report in wandb.Api().reports(f"{entity}/{project}"):
            if report.display_name == title:
                return str(report.id)
    except ValueError:  # no such project yet
        pass
    return ""


def _view(entity: str, project: str) -> Any:
    """The workspace that an earlier call has saved, or None."""
    server = urlsplit(wandb.Api().settings["base_url"])
    try:
        return workspaces.Workspace.from_url(f"{server.scheme}://{server.netloc}/{entity}/{project}?nw={VIEW}")
    except ValueError:  # what the library raises where there is none
        return None
