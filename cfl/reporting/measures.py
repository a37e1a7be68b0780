"""What is compared: matrices over tasks, and figures of a whole run."""

from __future__ import annotations

from dataclasses import dataclass

from cfl.metrics.base import Better, Figure
from cfl.metrics.measure import MEASURES
from cfl.runtime.run_files import matrix_file


@dataclass(frozen=True)
class RunMatrix:
    """A matrix over tasks of a run: what is measured on every task after every task.

    Attributes:
        key: identifies the matrix.
        name: words for readers.
        unit: unit of the values.
        better: which values are better, ``higher`` or ``lower``.
        file: name in the run folder; :func:`cfl.reporting.matrix_file.write_matrix_csv` describes the format.
    """

    key: str
    name: str
    unit: str
    better: Better
    file: str


RUN_MATRICES = tuple(
    RunMatrix(f"{of.name}{known}", f"{of.words}{told}", of.unit, of.better, matrix_file(of.name, known))
    for of in MEASURES
    for known, told in (("", ""), *([(of.known, ", task known")] if of.known else []))
)
"""The matrices that a run may have: that of its measure, and perhaps a second one for tests with known tasks."""

CURVES = {measure.name: measure.figure for measure in MEASURES}
"""A run's own measure -> the figure of its learning curve, a column of ``rounds.csv``."""

_COST = (
    Figure("uplink_bytes", "uplink MB", "sent by all clients over all rounds; MB = 1e6 bytes", "lower", divisor=1e6),
    Figure("downlink_bytes", "downlink MB", "received by all clients over all rounds", "lower", divisor=1e6),
    Figure("epsilon_all_tasks", "epsilon", "of one client over all tasks, for the run's delta (privacy.csv)", "lower"),
    Figure("seconds", "seconds", "duration of the run on its machine", "lower", 1),
    Figure("used_space", "used space %", "share of the input space that a subspace method uses up", None),
)
FIGURES = (*(figure for measure in MEASURES for figure in measure.columns), *_COST)
"""All figures, in the order of the columns. Tables leave out a figure that no run has."""

PRINTED = tuple(figure for figure in FIGURES if figure.printed)
"""The columns of the printed tables; pages and CSV files have all."""
