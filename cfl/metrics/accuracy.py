"""The accuracy matrix of a run. Its figures are explained in :mod:`cfl.metrics.transfer`."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.metrics.task_matrix import TaskMatrix
from cfl.metrics.transfer import average_accuracy, backward_transfer, forgetting, forgetting_max, forward_transfer
from cfl.runtime.moving import moved


class AccuracyMatrix(TaskMatrix):
    """Counts correct answers and computes the accuracy matrix of a run from them, in percent.

    Counts are int64, so the result is bit for bit the same for any order and number of processes. They are kept on the
    device of the answers, so that counting does not wait for an accelerator. With a matrix per client, a summary also
    has ``acc_std_clients`` (standard deviation of ACC over this population of clients, in points) and
    ``acc_worst_client`` (the lowest ACC, in percent).

    Arguments and errors as for :class:`TaskMatrix`.
    """

    higher_is_better = True
    scale = 100.0

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        super().__init__(num_tasks, num_clients, torch.int64)

    def add(
        self, row: int, task: int, outputs: Tensor, y: Tensor, allowed: Tensor | None, client: int | None = None
    ) -> None:
        """See :meth:`TaskMatrix.add`: count the samples whose largest output ``[B, O]`` is that of their class ``[B]``.

        ``allowed`` ``[O]`` are the outputs to choose among.
        """
        self.update(row, task, _correct(outputs, y, allowed).sum(), len(y), client)

    def add_by_owner(
        self, row: int, task: int, outputs: Tensor, y: Tensor, allowed: Tensor | None, owners: Tensor
    ) -> None:
        """As :meth:`add`, each sample to the matrix of the client that owns it. Other arguments as for :meth:`add`.

        Args:
            owners: ``[B]`` int64; samples of others than the clients 0 .. C-1 are not counted.
        """
        _, line, _ = self._place(row, task, 0)
        if outputs.device != self.sums.device:
            self.to(outputs.device)
        clients = len(self.sums)
        counted, own = (owners >= 0) & (owners < clients), owners.clamp(0, clients - 1)
        self.sums[:, line, task].index_add_(0, own, (_correct(outputs, y, allowed) & counted).long())
        self.counts[:, line, task].index_add_(0, own, counted.long())

    def update(self, row: int, task: int, correct: Tensor | int, total: int, client: int | None = None) -> None:
        """Add the answers of one batch or one whole test set. Other arguments and errors as for :meth:`add`.

        Args:
            correct: how many answers were right; an integer or an integer tensor of one element on any device.
            total: number of answers.

        Raises:
            ValueError: impossible counts.
            TypeError: ``correct`` is a floating point tensor.
        """
        place = self._place(row, task, client)
        if isinstance(correct, Tensor):
            if correct.is_floating_point() or correct.numel() != 1:
                raise TypeError(f"correct must be one integer, got {correct.dtype} {list(correct.shape)}")
            if correct.device != self.sums.device:
                self.to(correct.device)
            correct = correct.detach().to(torch.int64).reshape(())
        elif not 0 <= correct <= total:  # tensors are checked in compute(), to avoid waiting for a device here
            raise ValueError(f"{correct} correct answers out of {total} cannot be")
        if total < 0:
            raise ValueError(f"total = {total} cannot be; valid: 0 or more")
        self.sums[place] += correct
        self.counts[place] += total

    def _means(self) -> Tensor:
        if bool((self.sums > self.counts).any()) or bool((self.sums < 0).any()):
            raise ValueError("more correct answers than answers were counted, or fewer than none")
        return super()._means()

    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        return {
            "acc": average_accuracy(a, t),
            "fgt": forgetting(a, t),
            "fgt_max": forgetting_max(a, t),
            "fgt_max_last": forgetting_max(a, t, include_last=True),
            "bwt": backward_transfer(a, t),
            "fwt": forward_transfer(a, self.initial(), t),
        }

    def _of_clients(self, defined: Tensor) -> dict[str, float | None]:
        known = len(defined) > 0
        return {
            "acc_std_clients": defined.std(correction=0).item() if known else None,
            "acc_worst_client": defined.min().item() if known else None,
            **super()._of_clients(defined),
        }


def _correct(outputs: Tensor, y: Tensor, allowed: Tensor | None) -> Tensor:
    """``[B]`` bool, whether the largest of the outputs ``[B, O]`` that are ``allowed`` ``[O]`` is that of the class."""
    scores = outputs if allowed is None else outputs.masked_fill(~moved(allowed, outputs.device), -torch.inf)
    return scores.argmax(1).eq(y)
