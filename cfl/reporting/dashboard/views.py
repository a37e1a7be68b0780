"""Build a workspace and a report of wandb's library from the sections, and convert both to plain values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces
from wandb_workspaces import expr

from cfl.reporting.dashboard.panels import AXIS, GROUPING, SECTIONS, Panel
from cfl.reporting.method_names import plain

_COLUMNS, _HEIGHT = 24, 8  # size of a report's grid and height of a panel; three panels per row
_PINNED = ("summary:final/acc", "summary:final/fgt", "summary:final/bwt")


def workspace_of(entity: str, project: str, title: str, benchmarks: Sequence[str] = ()) -> Any:
    """Build a workspace: runs grouped by benchmark, partition, method and setting, and the sections of panels.

    Args:
        entity: user or team.
        project: where the runs are.
        title: name of the view.
        benchmarks: only runs of these; all if empty.
    """
    view = workspaces.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=[
            workspaces.Section(
                name=section.name,
                panels=[
                    _named(_panel(panel), f"workspace {section.name} {k}") for k, panel in enumerate(section.panels)
                ],
                is_open=True,
            )
            for section in SECTIONS
        ],
        settings=workspaces.WorkspaceSettings(x_axis=AXIS, max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=_of_benchmarks(benchmarks),
            groupby=[expr.Config(key) for key in GROUPING],
            pinned_columns=list(_PINNED),
        ),
    )
    view._internal_runset_id = plain("workspace runs")
    return view


def report_of(entity: str, project: str, title: str, benchmarks: Sequence[str] = ()) -> Any:
    """Build a report: for each section a heading, a sentence, and its panels for each benchmark.

    Args:
        entity: user or team.
        project: where the runs are.
        title: title of the report.
        benchmarks: each gets a run set; if empty, there is one run set of all runs.
    """
    blocks: list[Any] = [reports.TableOfContents()]
    for section in SECTIONS:
        blocks += [reports.H1(section.name), reports.P(section.about)]
        for benchmark in benchmarks or (None,):
            name = benchmark or "all runs"
            # Without a project, a run set uses the report's. With one, the library would ask a server for its number.
            runs = reports.Runset(
                name=name,
                filters=_of_benchmarks([benchmark] if benchmark else []),
                groupby=[f"config.{key}" for key in GROUPING],
            )
            if len(benchmarks) > 1:
                blocks.append(reports.H2(name))
            panels = []
            for k, panel in enumerate(section.panels):
                made = _named(_panel(panel), f"report {section.name} {name} {k}")
                width = _COLUMNS // 3
                made.layout = reports.Layout(x=k % 3 * width, y=k // 3 * _HEIGHT, w=width, h=_HEIGHT)
                panels.append(made)
            blocks.append(reports.PanelGrid(runsets=[_named(runs, f"{section.name} {name}")], panels=panels))
    description = "Runs of cfl, grouped by benchmark, partition, method and setting; written by `cfl dashboard`."
    return reports.Report(entity=entity, project=project, title=title, description=description, blocks=blocks)


def as_plain(workspace: Any, report: Any) -> dict[str, Any]:
    """Return titles and specifications of both, as a server would get them, in dictionaries and plain values."""
    view, written = workspace._to_model(), report._to_model()
    return {
        "entity": workspace.entity,
        "project": workspace.project,
        "workspace": {"title": view.display_name, "spec": _dumped(view.spec)},
        "report": {"title": written.display_name, "description": written.description, "spec": _dumped(written.spec)},
    }


def _dumped(spec: Any) -> Any:
    return json.loads(spec.model_dump_json(by_alias=True, exclude_none=True))


def _of_benchmarks(names: Sequence[str]) -> Any:
    return expr.And(expr.Config("benchmark").isin(list(names))) if names else ""


def _panel(panel: Panel) -> Any:
    spread: dict[str, Any] = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    if panel.kind == "lines":
        what: dict[str, Any] = {"metric_regex": panel.keys[0]} if panel.pattern else {"y": list(panel.keys)}
        return reports.LinePlot(title=panel.title, x=AXIS, **what, **spread)
    if panel.kind == "bars":
        return reports.BarPlot(title=panel.title, metrics=list(panel.keys), **spread)
    if panel.kind == "points":
        x, y = (reports.SummaryMetric(key) for key in panel.keys)
        return reports.ScatterPlot(title=panel.title, x=x, y=y)
    if panel.kind == "pictures":
        return reports.MediaBrowser(title=panel.title, media_keys=list(panel.keys), num_columns=2)
    return reports.WeavePanelSummaryTable(table_name=panel.keys[0])


def _named(made: Any, name: str) -> Any:
    """Give a panel or run set a fixed identifier instead of the library's random one."""
    made._id = plain(name)
    return made
