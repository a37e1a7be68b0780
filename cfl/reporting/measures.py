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
        key: identifies it.
        name: for readers.
        unit: of its values.
        better: which values are.
        file: of the run folder, with the matrix as :func:`cfl.reporting.matrix_file.write_matrix_csv` writes it.
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
"""Those a run may have: that of its measure, and perhaps the same with the tasks of test samples known."""

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
"""In the order of the columns; a figure that no run has is left out."""

PRINTED = tuple(figure for figure in FIGURES if figure.printed)
"""The columns of the printed tables; pages and CSV files have all."""
