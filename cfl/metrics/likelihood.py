"""Negative log-likelihoods and their forgetting, computed from the NLL matrix of a run.

``n[t, i]`` is the mean over task i's test samples of ``-log p(x)`` in nats after learning task t, both counted from 0,
NaN where it was not evaluated; lower is better. For tasks seen up to and including ``t``::

    NLL             mean over i <= t of n[t, i]
    base NLL        n[t, 0]                                       the first task
    new NLL         n[t, t]                                       the task just learned
    NLL forgetting  mean over i < t of max(0, n[t, i] - min over j < t of n[j, i])

(CONFEDMADE, appendix B.3. The forgetting printed there has the opposite sign in the maximum, which for a loss would
measure improvement. As there, the best earlier value may be from before task i was learned.) A run with one
personal model per client has one such matrix per client: functions take leading dimensions, ``[..., T, T]`` to
``[...]``, and never average over them.

Worked by hand for three tasks and ``n = [[70, 90, 95], [85, 60, 88], [80, 75, 50]]``:

- NLL = (80 + 75 + 50) / 3 = 68.333..., base NLL = 80, new NLL = 50.
- NLL forgetting = (max(0, 80 - min(70, 85)) + max(0, 75 - min(90, 60))) / 2 = (10 + 15) / 2 = 12.5.

FGT, BWT and FWT of NLL are computed from the matrix where runs are compared (:mod:`cfl.metrics.transfer`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cfl.metrics.task_matrix import TaskMatrix
from cfl.metrics.transfer import average_accuracy, last_evaluated, mean_over, own_tasks
from cfl.runtime.errors import BadUpdate, diverged


def nll_forgetting(n: Tensor, after: int | None = None) -> Tensor:
    """Return ``mean_{i < t} max(0, n[t, i] - min_{j < t} n[j, i])``.

    The minimum leaves out rows in which the task was not evaluated.

    Args:
        n: ``[..., T, T]`` NLL matrix in nats.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

    Returns:
        ``[...]`` float64 in nats; NaN for t = 0 and where a term is missing.
    """
    n = n.double()
    t = last_evaluated(n) if after is None else after
    if t == 0:
        return n.new_full(n.shape[:-2], math.nan)
    earlier = n[..., :t, :t]
    best = earlier.masked_fill(torch.isnan(earlier), math.inf).amin(-2)
    best = best.masked_fill(best == math.inf, math.nan)
    return mean_over((n[..., t, :t] - best).clamp(min=0), own_tasks(n)[..., :t])  # clamp leaves NaN alone


class NLLMatrix(TaskMatrix):
    """Sums negative log-likelihoods and computes the NLL matrix of a run from them, in nats per sample.

    Sums are float64, so the result is the same, up to that precision, for any order and number of processes.

    Arguments and errors as for :class:`TaskMatrix`.
    """

    higher_is_better = False

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        super().__init__(num_tasks, num_clients, torch.float64)

    def add(
        self, row: int, task: int, outputs: Tensor, y: Tensor, allowed: Tensor | None, client: int | None = None
    ) -> None:
        """See :meth:`TaskMatrix.add`: add log-likelihoods ``[B]`` in nats; ``y`` and ``allowed`` are unused."""
        self.update(row, task, -outputs.cpu().double().sum(), len(outputs), client)

    def update(self, row: int, task: int, total: Tensor | float, count: int, client: int | None = None) -> None:
        """Add one batch or one whole test set. Other arguments and errors as for :meth:`TaskMatrix.add`.

        Args:
            total: sum of the samples' negative log-likelihoods in nats.
            count: number of samples.

        Raises:
            ValueError: a count below 0.
            BadUpdate: the sum is not finite.
        """
        place = self._place(row, task, client)
        total = float(total)
        if count < 0:
            raise ValueError(f"{count} samples of task {task}")
        if not math.isfinite(total):
            raise BadUpdate(diverged(count, task, "a negative log-likelihood", total))
        self.sums[place] += total
        self.counts[place] += count

    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        return {
            "nll": average_accuracy(a, t),
            "base_nll": a[..., t, 0],
            "new_nll": a[..., t, t],
            "nll_forgetting": nll_forgetting(a, t),
        }
