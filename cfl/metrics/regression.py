"""Root mean squared errors and R2, computed from the errors of a run on every task after every task.

``a[t, i]`` is the root mean squared error on task i's test samples after learning task t, in the unit of the targets.
The mean is over the samples and over the D numbers that are predicted for each.

``R2[t, i]`` is the mean over the D numbers of ``1 - errors / deviations``: the sum of squared errors, divided by the
sum of squared deviations of the targets from their mean over task i's test samples. It is undefined if the targets
deviate from their mean by no more than a millionth of their size.

FGT, BWT and FWT are those of ``a``, with the signs of :func:`cfl.metrics.transfer.transfers`: FGT above 0 means that
the error rose, BWT and FWT above 0 mean that it fell.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cfl.metrics.task_matrix import TaskMatrix
from cfl.metrics.transfer import average_accuracy
from cfl.runtime.errors import BadUpdate, diverged


class ErrorMatrix(TaskMatrix):
    """Sums squared errors and computes the matrices of RMSE and R2 from them.

    Sums are float64, so the result is the same, up to that precision, for any order and number of processes.

    Attributes:
        moments: ``[..., T + 1, T, 3, D]``, of each number the sums of squared errors, targets and squared targets.

    Other arguments and errors as for :class:`TaskMatrix`.

    Args:
        num_outputs: D, how many numbers are predicted for a sample.
    """

    higher_is_better = False
    moments: Tensor

    def __init__(self, num_tasks: int, num_clients: int | None = None, num_outputs: int = 1) -> None:
        super().__init__(num_tasks, num_clients, torch.float64)
        zeros = torch.zeros((*self.sums.shape, 3, num_outputs), dtype=torch.float64)
        self.add_state("moments", zeros, dist_reduce_fx="sum", persistent=True)

    def update(self, row: int, task: int, predicted: Tensor, true: Tensor, client: int | None = None) -> None:
        """Add one batch or one whole test set. Other arguments and errors as for :meth:`TaskMatrix.add`.

        Args:
            predicted: the network's outputs, ``[B, D]``.
            true: the targets, ``[B, D]``.

        Raises:
            BadUpdate: an error is not finite.
        """
        place = self._place(row, task, client)
        predicted, true = predicted.cpu().double(), true.cpu().double()
        sums = torch.stack([(predicted - true).square().sum(0), true.sum(0), true.square().sum(0)])
        if not bool(sums.isfinite().all()):
            raise BadUpdate(diverged(len(true), task, "a squared error", float(sums[0].sum())))
        self.sums[place] += sums[0].mean()
        self.counts[place] += len(true)
        self.moments[place] += sums

    def _means(self) -> Tensor:
        return super()._means().sqrt()

    def determination(self) -> Tensor:
        """R2, of the shape of :meth:`compute`; NaN where undefined."""
        errors, first, second = self.moments.cpu()[..., :-1, :, :, :].unbind(-2)
        count = self.counts.cpu()[..., :-1, :].unsqueeze(-1)
        spread = second - first.square() / count
        r2 = 1 - errors / spread
        return r2.masked_fill((count == 0) | (spread <= 1e-12 * second), math.nan).mean(-1)

    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        return {**self._mean_and_transfers("rmse", a, t), "r2": average_accuracy(self.determination(), t)}
