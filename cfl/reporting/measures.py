"""What is compared: matrices over tasks, and figures of a whole run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from cfl.metrics.base import Better, Figure, own_key
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

ON_VALIDATION = "on validation samples"
"""What titles, captions and printed figures say if they are not of the test sets."""

_COST = (
    Figure("uplink_bytes", "uplink MB", "sent by all clients over all rounds; MB = 1e6 bytes", "lower", divisor=1e6),
    Figure("downlink_bytes", "downlink MB", "received by all clients over all rounds", "lower", divisor=1e6),
    Figure("epsilon_all_tasks", "epsilon", "of one client over all tasks, for the run's delta (privacy.csv)", "lower"),
    Figure("seconds", "seconds", "duration of the run on its machine", "lower", 1),
    Figure("used_space", "used space %", "share of the input space that a subspace method uses up", None),
)
_OF_MEASURES = tuple(figure for measure in MEASURES for figure in measure.columns)
FIGURES = (*_OF_MEASURES, *_COST)
"""All figures, in the order of the columns. Tables leave out a figure that no run has."""


def figures_with(own: Mapping[str, Better]) -> tuple[Figure, ...]:
    """Return :data:`FIGURES` and those of a user's measures.

    Args:
        own: name -> which values are better, as in summaries.
    """
    return (*_OF_MEASURES, *(figure for name, better in own.items() for figure in figures_of_own(name, better)), *_COST)


def figures_of_own(name: str, better: Better) -> Iterator[Figure]:
    """Yield mean, FGT, BWT and FWT of a user's measure; the last two are in no printed table."""
    yield Figure(own_key(name), name, f"mean {name} over all tasks at the end", better, 4)
    for key, meaning, of_transfer in (
        ("fgt", "how much worse tasks became since each was learned", "lower"),
        ("bwt", "backward transfer, the negative of its FGT", "higher"),
        ("fwt", "forward transfer: how much better tasks became before each was learned", "higher"),
    ):
        heading, shown = f"{name} {key.upper()}", key == "fgt"
        yield Figure(own_key(name, key), heading, meaning, cast(Better, of_transfer), 4, True, printed=shown)


def matrices_with(own: Mapping[str, Better]) -> tuple[RunMatrix, ...]:
    """Return :data:`RUN_MATRICES` and those of a user's measures, as :func:`figures_with`."""
    return (*RUN_MATRICES, *(RunMatrix(own_key(n), n, "own unit", b, matrix_file(own_key(n))) for n, b in own.items()))
