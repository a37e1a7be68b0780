"""Sections of panels that compare runs, by the names under which ``cfl.callbacks.DashboardLog`` logs figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cfl.metrics.measure import MEASURES, Measure

AXIS = "round"
"""Key of the horizontal axis of lines."""

GROUPING = ("benchmark", "partition", "method", "setting")
"""Keys of a run's configuration. Runs that agree in them are shown together, as mean and standard deviation.
``setting`` is a hash of all options that decide results, without the seed."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        kind: ``lines`` over rounds, ``bars`` of the last values, ``pictures``, ``table``, or ``points``, the last value
            of the second key over that of the first.
        title: text above the panel.
        keys: names of the figures that it shows; for ``lines`` of every task, one regular expression.
        pattern: whether the key is a regular expression.
    """

    kind: Literal["lines", "bars", "pictures", "table", "points"]
    title: str
    keys: tuple[str, ...]
    pattern: bool = False


@dataclass(frozen=True)
class Section:
    """Panels under a heading.

    Attributes:
        name: the heading.
        about: a sentence for the report.
        panels: in their order.
    """

    name: str
    about: str
    panels: tuple[Panel, ...]


def _section(measure: Measure) -> Section:
    """Return the section for runs with a measure other than accuracy."""
    name, figure, unit = measure.mean_label, measure.figure, measure.unit
    headings = {column.key: column.heading for column in measure.columns}
    known = f"{figure}{measure.known}"
    lasting = [key for key in measure.of_papers if key.startswith(f"{figure}_") and key != known]  # in the same unit
    return Section(
        measure.heading,
        measure.about,
        (
            Panel("bars", f"{name} in {unit}", (f"final/{figure}",)),
            Panel("lines", f"{name} in {unit}", (f"cl/{figure}",)),
            *(Panel("lines", f"{headings[key]} in {unit}", (f"cl/{key}",)) for key in lasting),
            Panel("lines", f"{name} of each task in {unit}", (f"task_[0-9]+/{figure}",), pattern=True),
            Panel("pictures", f"{name} matrix", (f"cl/{measure.name}_heatmap",)),
            Panel("pictures", f"{name} after each task", (f"cl/{measure.name}_curve",)),
            Panel("table", f"{name} matrix", (f"cl/{measure.name}_matrix",)),
            Panel("points", f"{name} over bytes sent", ("comm/uplink_bytes", f"cl/{figure}")),
        ),
    )


SECTIONS = (
    Section(
        "After the last task",
        "Means over seeds and their standard deviation: accuracy over all tasks, what was forgotten of them, and the "
        "effect of later tasks on earlier ones. Runs that are not finished, or stopped before their last task, have "
        "none of it.",
        (
            Panel("bars", "ACC in %", ("final/acc",)),
            Panel("bars", "FGT in points", ("final/fgt",)),
            Panel("bars", "BWT in points", ("final/bwt",)),
        ),
    ),
    Section(
        "Over rounds",
        "The same figures over the tasks seen so far.",
        (
            Panel("lines", "ACC in %", ("cl/acc",)),
            Panel("lines", "FGT in points", ("cl/fgt",)),
            Panel("lines", "BWT in points", ("cl/bwt",)),
            Panel("lines", "FWT in points", ("cl/fwt",)),
            Panel("lines", "Accuracy of each task in %", ("task_[0-9]+/acc",), pattern=True),
            Panel("lines", "Training loss", ("train/loss",)),
        ),
    ),
    Section(
        "Matrices",
        "Row: after learning a task; column: measured on a task.",
        (
            Panel("pictures", "Accuracy matrix", ("cl/accuracy_heatmap",)),
            Panel("pictures", "ACC after each task", ("cl/accuracy_curve",)),
            Panel("table", "Accuracy matrix", ("cl/accuracy_matrix",)),
        ),
    ),
    *(_section(measure) for measure in MEASURES if measure.heading),
    Section(
        "Cost",
        "Bytes that all clients together have sent and received, and seconds of wall clock.",
        (
            Panel("points", "ACC over bytes sent", ("comm/uplink_bytes", "cl/acc")),
            Panel("lines", "Bytes sent", ("comm/uplink_bytes",)),
            Panel("lines", "Bytes received", ("comm/downlink_bytes",)),
            Panel("lines", "Seconds", ("time/seconds",)),
        ),
    ),
    Section(
        "Data",
        "Samples per client, task and class.",
        (Panel("pictures", "Partition", ("data/partition",)),),
    ),
)
"""All sections, in the order in which they are shown."""
