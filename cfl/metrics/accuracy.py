"""Accuracy, forgetting and transfer, computed from the accuracy matrix of a run.

``a[t, i]`` is the accuracy in percent on task ``i`` after learning task ``t``, both counted from 0, NaN where it
was not evaluated. ``b[i]`` is the accuracy on task ``i`` of the model before any training. A run with one personal
model per client has one such matrix per client: every function takes leading dimensions, ``[..., T, T]`` to
``[...]``, and never averages over them.

For tasks seen up to and including ``t``::

    ACC      mean over i <= t of a[t, i]
    FGT      mean over i < t of a[i, i] - a[t, i]                      FOT, eq (13); may be negative
    FGT max  mean over i < t of (max over j < t of a[j, i]) - a[t, i]  Fed-A-GEM, section 5.1; Chaudhry et al. 2018
             with the last row too (max over i <= j <= t), as Fed-A-GEM's code has it: never negative
    BWT      mean over i < t of a[t, i] - a[i, i]                      Lopez-Paz and Ranzato 2017; = -FGT
    FWT      mean over 1 <= i <= t of a[i-1, i] - b[i]                 Lopez-Paz and Ranzato 2017

Worked by hand for three tasks, ``b = (10, 12, 8)`` and

    =============  ======  ======  ======
    after task     task 0  task 1  task 2
    =============  ======  ======  ======
    0                  70      20      14
    1                  90      80      30
    2                  75      60      85
    =============  ======  ======  ======

- ACC = (75 + 60 + 85) / 3 = 73.333...
- FGT = ((70 - 75) + (80 - 60)) / 2 = (-5 + 20) / 2 = 7.5, BWT = -7.5: task 0 gained after it was learned.
- FGT max = ((max(70, 90) - 75) + (max(20, 80) - 60)) / 2 = (15 + 20) / 2 = 17.5: the peak of task 0 came later.
- FWT = ((20 - 12) + (30 - 8)) / 2 = (8 + 22) / 2 = 15.

A mean over no task (FGT, BWT and FWT after the first task) and a mean with a term that was not evaluated are NaN.
With a matrix per client, a client's means leave out the tasks on which it was never evaluated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cfl.metrics.task_matrix import TaskMatrix

FORMULAS: dict[str, str] = {
    "acc": "mean over i <= t of a[t, i], in percent (higher is better)",
    "fgt": "mean over i < t of a[i, i] - a[t, i], in points (lower is better)",
    "fgt_max": "mean over i < t of (max over j < t of a[j, i]) - a[t, i], in points (lower is better)",
    "fgt_max_last": "mean over i < t of (max over i <= j <= t of a[j, i]) - a[t, i], in points (lower is better)",
    "bwt": "mean over i < t of a[t, i] - a[i, i], in points (higher is better)",
    "fwt": "mean over 1 <= i <= t of a[i-1, i] - b[i], in points (higher is better)",
}
"""What each key of :meth:`AccuracyMatrix.summary` means, as plain text for help pages and tables; ``a[t, i]`` is the
accuracy on task i after learning task t, ``b[i]`` before any training, both counted from 0."""


def last_evaluated(a: Tensor) -> int | None:
    """Index of the last row of ``a [..., T, T]`` with an entry, at any leading position; None if there is none."""
    evaluated = (~torch.isnan(a)).any(-1).reshape(-1, a.shape[-2]).any(0).nonzero()
    return int(evaluated[-1]) if len(evaluated) else None


def _matrix_and_row(a: Tensor, after: int | None) -> tuple[Tensor, int | None]:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or not a.shape[-1] or not a.is_floating_point():
        raise ValueError(f"an accuracy matrix is floating point [..., T, T], got {a.dtype} {list(a.shape)}")
    if after is not None and not 0 <= after < a.shape[-1]:
        raise ValueError(f"after = {after} is no task of this matrix; valid: 0 .. {a.shape[-1] - 1}")
    return a.double(), last_evaluated(a) if after is None else after


def _undefined(a: Tensor) -> Tensor:
    return a.new_full(a.shape[:-2], math.nan)


def own_tasks(a: Tensor) -> Tensor:
    """``[..., T]`` bool: the tasks over which means are taken; with leading dimensions, those evaluated at any time.

    Args:
        a: ``[..., T, T]``.
    """
    own = ~torch.isnan(a).all(-2)
    return own if a.ndim > 2 else torch.ones_like(own)


def mean_over(terms: Tensor, own: Tensor) -> Tensor:
    """Mean ``[...]`` of the terms ``[..., n]`` where ``own [..., n]`` is True; NaN without any, or if one is NaN."""
    total = torch.where(own, terms, torch.zeros_like(terms)).sum(-1)
    return total / own.sum(-1)


def average_accuracy(a: Tensor, after: int | None = None) -> Tensor:
    """ACC: mean over the tasks seen so far, ``mean_{i <= t} a[t, i]``.

    Args:
        a: ``[..., T, T]`` accuracy matrix in percent.
        after: the row t, 0 .. T-1; None takes the last row with an entry.

    Returns:
        ``[...]`` float64 in percent, NaN where a term is missing.

    Raises:
        ValueError: ``a`` is not a floating point ``[..., T, T]`` or ``after`` not one of its rows.
    """
    a, t = _matrix_and_row(a, after)
    return _undefined(a) if t is None else mean_over(a[..., t, : t + 1], own_tasks(a)[..., : t + 1])


def forgetting(a: Tensor, after: int | None = None) -> Tensor:
    """FGT, diagonal form: ``mean_{i < t} (a[i, i] - a[t, i])`` (FOT, eq 13); negative when old tasks improved.

    Arguments, result (in points) and errors as for :func:`average_accuracy`; NaN for t = 0.
    """
    a, t = _matrix_and_row(a, after)
    if t is None:
        return _undefined(a)
    return mean_over(a.diagonal(dim1=-2, dim2=-1)[..., :t] - a[..., t, :t], own_tasks(a)[..., :t])


def forgetting_max(a: Tensor, after: int | None = None, include_last: bool = False) -> Tensor:
    """FGT against the best earlier accuracy: ``mean_{i < t} (max_j a[j, i]) - a[t, i]`` (Fed-A-GEM, section 5.1).

    As in the paper, the maximum is over all ``j < t``, which includes rows from before task i was learned. Rows in
    which task i was not evaluated are left out. With ``include_last`` the function follows the authors' code instead:
    the maximum is over ``i <= j <= t`` (earlier rows count as 0), so the result is never negative.

    Args:
        a: ``[..., T, T]`` accuracy matrix in percent.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.
        include_last: follow the authors' code instead of their formula.

    Returns:
        ``[...]`` float64 in points; NaN for t = 0 and where a term is missing.

    Raises:
        ValueError: ``a`` is not a floating point ``[..., T, T]`` or ``after`` not one of its rows.
    """
    a, t = _matrix_and_row(a, after)
    if t is None or t == 0:
        return _undefined(a)
    candidates = a[..., : t + 1 if include_last else t, :t]
    excluded = torch.isnan(candidates)
    if include_last:
        excluded = excluded | torch.ones_like(excluded).triu(1)
    best = candidates.masked_fill(excluded, -math.inf).amax(-2)
    return mean_over(best.masked_fill(best == -math.inf, math.nan) - a[..., t, :t], own_tasks(a)[..., :t])


def backward_transfer(a: Tensor, after: int | None = None) -> Tensor:
    """BWT: ``mean_{i < t} (a[t, i] - a[i, i])`` (Lopez-Paz and Ranzato 2017), the negative of :func:`forgetting`.

    Arguments, result (in points) and errors as for :func:`average_accuracy`; NaN for t = 0.
    """
    a, t = _matrix_and_row(a, after)
    if t is None:
        return _undefined(a)
    return mean_over(a[..., t, :t] - a.diagonal(dim1=-2, dim2=-1)[..., :t], own_tasks(a)[..., :t])


def forward_transfer(a: Tensor, initial: Tensor, after: int | None = None) -> Tensor:
    """FWT: ``mean_{1 <= i <= t} (a[i-1, i] - b[i])`` (Lopez-Paz and Ranzato 2017): what is known before learning.

    Args:
        a: ``[..., T, T]`` accuracy matrix in percent, with the entries just above the diagonal.
        initial: ``[..., T]`` accuracies b of the model before any training, in percent.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

    Returns:
        ``[...]`` float64 in points; NaN for t = 0 and where a term is missing.

    Raises:
        ValueError: ``a`` is not a floating point ``[..., T, T]``, ``initial`` not ``[..., T]`` or ``after`` not a row.
    """
    a, t = _matrix_and_row(a, after)
    if initial.shape[-1:] != a.shape[-1:]:
        raise ValueError(f"initial must be [..., T={a.shape[-1]}], got {list(initial.shape)}")
    if t is None:
        return _undefined(a)
    before_learning = a.diagonal(offset=1, dim1=-2, dim2=-1)[..., :t]
    return mean_over(before_learning - initial.to(a)[..., 1 : t + 1], own_tasks(a)[..., 1 : t + 1])


class AccuracyMatrix(TaskMatrix):
    """Counts correct answers and computes the accuracy matrix of a run from them, in percent.

    Counts are int64, so the result is bit for bit the same for any order and number of processes. They are on the
    device of the first answers, so that counting does not wait for an accelerator.

    Args:
        num_tasks: number of tasks T of the stream, at least 1.
        num_clients: number of clients C when each is evaluated on a model of its own, at least 1; None for one
            global model.

    Raises:
        cfl.runtime.errors.ConfigError: a number below 1.
    """

    higher_is_better = True
    scale = 100.0

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        super().__init__(num_tasks, num_clients, torch.int64)

    def update(self, row: int, task: int, correct: Tensor | int, total: int, client: int | None = None) -> None:
        """Add the answers of one batch or one whole test set.

        Args:
            row: the task just learned, 0 .. T-1, or -1 for the model before any training.
            task: the task whose test samples these are, 0 .. T-1.
            correct: how many answers were right; an integer or an integer tensor of one element on any device.
            total: how many answers there were.
            client: whose model answered, 0 .. C-1; None exactly when there is one global model.

        Raises:
            ValueError: an index out of range, a client where none belongs or none where one does, or counts that
                no test can give.
            TypeError: ``correct`` is a floating point tensor.
        """
        place = self._place(row, task, client)
        if isinstance(correct, Tensor):
            if correct.is_floating_point() or correct.numel() != 1:
                raise TypeError(f"correct must be one integer, got {correct.dtype} {list(correct.shape)}")
            if correct.device != self.sums.device:
                self.to(correct.device)
            correct = correct.detach().to(torch.int64).reshape(())
        elif not 0 <= correct <= total:  # tensors are checked in compute(): no waiting here
            raise ValueError(f"{correct} correct answers out of {total} cannot be")
        if total < 0:
            raise ValueError(f"total = {total} cannot be; valid: 0 or more")
        self.sums[place] += correct
        self.counts[place] += total

    def _means(self) -> Tensor:
        if bool((self.sums > self.counts).any()) or bool((self.sums < 0).any()):
            raise ValueError("more correct answers than answers were counted, or fewer than none")
        return super()._means()

    def summary(self, after: int | None = None) -> dict[str, float | None]:
        """The figures of :data:`FORMULAS`, ready for JSON.

        With personal models each figure is computed per client, over the tasks that it holds, and then averaged over
        the clients for which it is defined. Three more keys describe the spread of ACC over these clients:
        ``acc_std_clients`` (standard deviation over this population, in points), ``acc_worst_client`` (the lowest, in
        percent) and ``clients_evaluated`` (how many there are).

        Args:
            after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

        Returns:
            ``acc`` in percent, ``fgt``, ``fgt_max``, ``fgt_max_last``, ``bwt`` and ``fwt`` in points; None where
            undefined, as FGT is after the first task.

        Raises:
            ValueError: ``after`` is not a row.
        """
        a, b = self.compute(), self.initial()
        figures = {
            "acc": average_accuracy(a, after),
            "fgt": forgetting(a, after),
            "fgt_max": forgetting_max(a, after),
            "fgt_max_last": forgetting_max(a, after, include_last=True),
            "bwt": backward_transfer(a, after),
            "fwt": forward_transfer(a, b, after),
        }
        summary = {key: _defined(figure.nanmean()) for key, figure in figures.items()}
        if self.num_clients is not None:
            per_client = figures["acc"][~torch.isnan(figures["acc"])]
            known = len(per_client) > 0
            summary["acc_std_clients"] = per_client.std(correction=0).item() if known else None
            summary["acc_worst_client"] = per_client.min().item() if known else None
            summary["clients_evaluated"] = len(per_client)
        return summary


def _defined(value: Tensor) -> float | None:
    return None if math.isnan(value) else value.item()
