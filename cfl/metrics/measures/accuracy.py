"""Classification and its accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.metrics.base import Figure, Measure

if TYPE_CHECKING:
    from cfl.metrics.accuracy import AccuracyMatrix


class Accuracy(Measure):
    """Classification: trained by the cross-entropy, measured by the share of right answers."""

    name = "accuracy"
    figure = "acc"
    words = "accuracy"
    one = "an accuracy"
    unit = "%"
    label = "accuracy (%)"
    task_label = "accuracy on task"
    formulas: ClassVar[dict[str, str]] = {
        "acc": "mean over i <= t of a[t, i], in percent (higher is better)",
        "fgt": "mean over i < t of a[i, i] - a[t, i], in points (lower is better)",
        "fgt_max": "mean over i < t of (max over j < t of a[j, i]) - a[t, i], in points (lower is better)",
        "fgt_max_last": "mean over i < t of (max over i <= j <= t of a[j, i]) - a[t, i], in points (lower is better)",
        "bwt": "mean over i < t of a[t, i] - a[i, i], in points (higher is better)",
        "fwt": "mean over 1 <= i <= t of a[i-1, i] - b[i], in points (higher is better)",
    }
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 100.0)
    lower_is_better = False
    columns = (
        Figure("acc", "ACC %", "mean accuracy over all tasks at the end", "higher"),
        Figure("acc_task_il", "ACC % (task known)", "the same where the task is known at test time", "higher"),
        Figure("fgt", "FGT", "mean loss of accuracy since each task was learned, in points", "lower"),
        Figure("fgt_max", "FGT max", "the same against the best accuracy before the last task", "lower", printed=False),
        Figure("bwt", "BWT", "backward transfer in points, the negative of FGT", "higher", signed=True),
        Figure("fwt", "FWT", "forward transfer: points gained on a task before its training", "higher", signed=True),
        Figure("acc_worst_client", "worst client %", "the lowest ACC of any client", "higher", printed=False),
        Figure(
            "acc_worst_client_by_owner",
            "worst client, own tests %",
            "the lowest ACC of any client on its own test samples",
            "higher",
            printed=False,
        ),
    )
    of_papers = ("acc", "fgt", "bwt")
    known = "_task_il"
    scenarios = ("task", "class", "domain")
    targets = "classes"
    is_cross_entropy = True
    is_accuracy = True

    def scenario_in_words(self, scenario: str) -> str:
        """Return words such as ``class-incremental``."""
        return f"{scenario}-incremental"

    def matrix(self, num_tasks: int, num_clients: int | None, num_outputs: int) -> AccuracyMatrix:
        """See :meth:`Measure.matrix`."""
        from cfl.metrics.accuracy import AccuracyMatrix

        return AccuracyMatrix(num_tasks, num_clients)

    def has_known(self, scenario: str, model_per_task: bool) -> bool:
        """Whether classes of several tasks compete in tests."""
        return scenario == "class"

    def losses(self, outputs: Tensor, y: Tensor, allowed: Tensor | None, x: Tensor | None) -> Tensor:
        """Cross-entropies in nats over the outputs allowed."""
        if allowed is not None:
            outputs = outputs.masked_fill(~allowed, -torch.inf)
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)


ACCURACY = Accuracy()
