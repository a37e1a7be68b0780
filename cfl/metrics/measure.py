"""The two measures of a run, accuracy and NLL, and their names in tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cfl.metrics.accuracy import FORMULAS
from cfl.metrics.likelihood import NLL_FORMULAS


@dataclass(frozen=True)
class Measure:
    """One kind of matrix, a row per task learned and a column per task measured.

    Attributes:
        figure: key of its mean over the tasks seen, in summaries and tables.
        name: first part of the names of its files, e.g. of ``accuracy_matrix.csv``.
        label: label of axes and colour scales, with the unit.
        task_label: label of the axis with the tasks measured.
        formulas: figure -> its formula.
        bounds: smallest and greatest possible value, for colour scales; None takes those of the data.
        lower_is_better: whether lower values are better.
    """

    figure: str
    name: str
    label: str
    task_label: str
    formulas: Mapping[str, str]
    bounds: tuple[float, float] | None
    lower_is_better: bool

    @property
    def mean_label(self) -> str:
        """Name of the mean over the tasks seen, such as ``ACC``."""
        return self.figure.upper()


ACCURACY = Measure("acc", "accuracy", "accuracy (%)", "accuracy on task", FORMULAS, (0.0, 100.0), False)
NLL = Measure("nll", "nll", "NLL (nats)", "NLL of task", NLL_FORMULAS, None, True)
