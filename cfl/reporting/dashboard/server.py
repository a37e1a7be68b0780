"""Save workspace and report on a wandb server, replacing those of the same name."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import wandb
import wandb_workspaces.workspaces as workspaces

VIEW = "cflcompare"
"""Name of the workspace's view in its address (``?nw=``). It is fixed, so that a later call finds the workspace."""


def publish(workspace: Any, report: Any) -> tuple[str, str]:
    """Save workspace and report, and return their addresses.

    The report is saved first, because this creates a missing project. It replaces a report with the same title.

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
    """Return the server's default entity (user or team) for the account that is logged in."""
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
    except ValueError:  # the library raises it if there is no such workspace
        return None
