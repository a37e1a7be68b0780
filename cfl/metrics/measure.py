"""What a run measures after each task, and how tables and pictures name it: accuracies, or likelihoods."""

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
        name: of the files that hold it, e.g. ``accuracy_matrix.csv``.
        label: of axes and colour scales, with the unit.
        task_label: of the axis with the tasks measured.
        formulas: figure -> what it means.
        bounds: smallest and greatest value there can be, for colour scales; None where values tell.
        lower_is_better: whether it is a loss.
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
        """What the mean over the tasks seen is called, as in ``ACC``."""
        return self.figure.upper()


ACCURACY = Measure("acc", "accuracy", "accuracy (%)", "accuracy on task", FORMULAS, (0.0, 100.0), False)
NLL = Measure("nll", "nll", "NLL (nats)", "NLL of task", NLL_FORMULAS, None, True)
