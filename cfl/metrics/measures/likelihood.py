"""Density estimation and its negative log-likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from cfl.metrics.base import Figure, Measure

if TYPE_CHECKING:
    from cfl.metrics.likelihood import NLLMatrix


def negative_log_likelihoods(logits: Tensor, x: Tensor) -> Tensor:
    """``-sum_d log p(x_d)`` in nats, ``[B]``, where ``p(x_d = 1)`` is the sigmoid of a logit.

    Args:
        logits: ``[B, D]``.
        x: the samples, ``[B, ...]`` with D numbers each.
    """
    return F.binary_cross_entropy_with_logits(logits, x.flatten(1).to(logits.dtype), reduction="none").sum(1)


class Likelihood(Measure):
    """Density estimation: trained and measured by ``-log p(x)`` of binary samples."""

    name = "nll"
    figure = "nll"
    words = "negative log-likelihood"
    one = "an NLL"
    unit = "nats"
    label = "NLL (nats)"
    task_label = "NLL of task"
    formulas: ClassVar[dict[str, str]] = {
        "nll": "mean over i <= t of n[t, i], in nats (lower is better)",
        "base_nll": "n[t, 0], the first task, in nats (lower is better)",
        "new_nll": "n[t, t], the task just learned, in nats (lower is better)",
        "nll_forgetting": "mean over i < t of max(0, n[t, i] - min over j < t of n[j, i]), in nats (lower is better)",
    }
    lower_is_better = True
    columns = (
        Figure("nll", "NLL", "mean negative log-likelihood over all tasks at the end", "lower", 4),
        Figure("nll_task_aware", "NLL (task known)", "the same where the task is known at test time", "lower", 4),
        Figure("base_nll", "NLL of task 0", "negative log-likelihood on the first task at the end", "lower", 4),
        Figure("new_nll", "NLL of last task", "negative log-likelihood on the last task at the end", "lower", 4),
        Figure(
            "nll_forgetting", "NLL forgetting", "mean rise above the lowest value that a task had before", "lower", 4
        ),
        Figure("nll_fgt", "NLL FGT", "mean rise since each task was learned", "lower", 4, True, printed=False),
        Figure("nll_bwt", "NLL BWT", "backward transfer, the negative of its FGT", "higher", 4, True, printed=False),
        Figure("nll_fwt", "NLL FWT", "forward transfer: fall before it is learned", "higher", 4, True, printed=False),
    )
    of_papers = ("nll", "nll_task_aware", "nll_forgetting")
    known = "_task_aware"
    scenarios = ("density",)
    targets = "inputs"
    predicts = "density"
    network = "a network that estimates densities, such as MADE, in this scenario"
    by_outputs = False
    tells_tasks = False  # the task of a test sample is unknown
    answers = "log-likelihoods, in nats"
    answers_shape = "[N]"
    heading = "Densities"
    about = "Runs that estimate a density have negative log-likelihoods (nats) in place of accuracies; lower is better."

    def num_outputs(self, shape: tuple[int, int, int], classes: Sequence[int]) -> int:
        """See :meth:`Measure.num_outputs`: one per variable of a sample."""
        return math.prod(shape)

    def matrix(self, num_tasks: int, num_clients: int | None, num_outputs: int) -> NLLMatrix:
        """See :meth:`Measure.matrix`."""
        from cfl.metrics.likelihood import NLLMatrix

        return NLLMatrix(num_tasks, num_clients)

    def has_known(self, scenario: str, model_per_task: bool) -> bool:
        """Whether there is a model for every task."""
        return model_per_task

    def losses(self, outputs: Tensor, y: Tensor, allowed: Tensor | None, x: Tensor | None) -> Tensor:
        """``-log p(x)`` in nats."""
        assert x is not None
        return negative_log_likelihoods(outputs, x)

    def check_head(self, network: nn.Module) -> None:
        """Accept any network, because no output belongs to a task."""


NLL = Likelihood()
