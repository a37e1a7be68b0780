"""Accuracy, forgetting and transfer, read off the accuracy matrix of one run.

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
With a matrix per client, tasks on which a client was never evaluated are not its own: its means are over the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from cfl import processes
from cfl.errors import ConfigError

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
    """Index of the last row of ``a [..., T, T]`` in which anything was evaluated, in any leading position; or None."""
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
    """``[..., T]`` bool: which tasks have a part in the means: with leading dimensions, those evaluated at any time.

    Args:
        a: ``[..., T, T]``.
    """
    own = ~torch.isnan(a).all(-2)
    return own if a.ndim > 2 else torch.ones_like(own)


def mean_over(terms: Tensor, own: Tensor) -> Tensor:
    """``[..., n]`` terms to their mean ``[...]`` over those with ``own [..., n]``; NaN of none, and with a NaN term."""
    total = torch.where(own, terms, torch.zeros_like(terms)).sum(-1)
    return total / own.sum(-1)


def average_accuracy(a: Tensor, after: int | None = None) -> Tensor:
    """ACC: mean over the tasks seen so far, ``mean_{i <= t} a[t, i]``.

    Args:
        a: ``[..., T, T]`` accuracy matrix in percent.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

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

    The paper prints the maximum over all ``j < t``, which includes rows from before task i was learned; so does this
    function. A row in which task i was not evaluated is left out of the maximum. The authors' code does something
    else, to be had with ``include_last``: its maximum runs over ``i <= j <= t`` (earlier rows count as 0), hence is
    never negative.

    Args:
        a: ``[..., T, T]`` accuracy matrix in percent.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.
        include_last: the authors' code instead of their formula.

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
        a: ``[..., T, T]`` accuracy matrix in percent, evaluated one above the diagonal.
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


class AccuracyMatrix(Metric):
    """Counts of correct answers, from which the accuracy matrix of a run is computed exactly.

    Counting is in int64 and additive: batches may arrive in any order, over any number of processes, before or after
    a checkpoint was loaded, and give the same matrix to the last bit. The counts are part of ``state_dict()`` and lie
    where the first answers lay, so that counting waits for no accelerator. With several processes each counts a share
    of a row, from a cleared row on; :meth:`add_up` then makes it the same in all of them.

    Args:
        num_tasks: number of tasks T of the stream, at least 1.
        num_clients: number of clients C when each is evaluated on a model of its own, at least 1; None for one
            global model.

    Raises:
        cfl.errors.ConfigError: a number below 1.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    correct: Tensor
    total: Tensor
    initial_correct: Tensor
    initial_total: Tensor

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        # Without a cache: clear_row, merge_state and load_state_dict change the counts behind torchmetrics' back.
        # Without its reduction over processes, which would add up what add_up has added up already.
        super().__init__(compute_with_cache=False, sync_on_compute=False)
        if num_tasks < 1:
            raise ConfigError("num_tasks", num_tasks, "an integer of at least 1")
        if num_clients is not None and num_clients < 1:
            raise ConfigError("num_clients", num_clients, "an integer of at least 1, or null for one global model")
        self.num_tasks, self.num_clients = num_tasks, num_clients
        clients = () if num_clients is None else (num_clients,)
        for name in ("correct", "total"):
            for prefix, shape in (("", (num_tasks, num_tasks)), ("initial_", (num_tasks,))):
                zeros = torch.zeros(clients + shape, dtype=torch.int64)
                self.add_state(prefix + name, zeros, dist_reduce_fx="sum", persistent=True)

    @property
    def update_called(self) -> bool:
        """Whether anything was counted, also before a checkpoint that was loaded."""
        return super().update_called or bool(self.total.any() or self.initial_total.any())

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
        if not -1 <= row < self.num_tasks:
            raise ValueError(f"row = {row} cannot be; valid: 0 .. {self.num_tasks - 1}, or -1 for before training")
        if not 0 <= task < self.num_tasks:
            raise ValueError(f"task = {task} cannot be; valid: 0 .. {self.num_tasks - 1}")
        if (client is None) != (self.num_clients is None) or not 0 <= (client or 0) < (self.num_clients or 1):
            valid = "None (one global model)" if self.num_clients is None else f"0 .. {self.num_clients - 1}"
            raise ValueError(f"client = {client} cannot be; valid: {valid}")
        if isinstance(correct, Tensor):
            if correct.is_floating_point() or correct.numel() != 1:
                raise TypeError(f"correct must be one integer, got {correct.dtype} {list(correct.shape)}")
            if correct.device != self.correct.device:
                self.to(correct.device)
            correct = correct.detach().to(torch.int64).reshape(())
        elif not 0 <= correct <= total:  # of a tensor only compute() asks, an accelerator would have to wait here
            raise ValueError(f"{correct} correct answers out of {total} cannot be")
        if total < 0:
            raise ValueError(f"total = {total} cannot be; valid: 0 or more")
        index = ((client,) if client is not None else ()) + ((row, task) if row >= 0 else (task,))
        counts = (self.correct, self.total) if row >= 0 else (self.initial_correct, self.initial_total)
        counts[0][index] += correct
        counts[1][index] += total

    def clear_row(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Forget one row (-1: before training), so that evaluating again replaces it.

        Args:
            row: the row.
            clients: of whose matrices; None for every client's, or that of the one global model.

        Raises:
            ValueError: ``row`` is not -1 .. T-1.
        """
        if not -1 <= row < self.num_tasks:
            raise ValueError(f"row = {row} cannot be; valid: 0 .. {self.num_tasks - 1}, or -1 for before training")
        for counts in (self.correct, self.total) if row >= 0 else (self.initial_correct, self.initial_total):
            of_row = counts[..., row, :] if row >= 0 else counts
            of_row[_chosen(clients)] = 0

    def add_up(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Add what all processes have counted in one row (-1: before training) since it was cleared in all of them.

        All processes must call it, once, with the same arguments: those with which the row was cleared.

        Raises:
            ValueError: ``row`` is not -1 .. T-1.
        """
        if not -1 <= row < self.num_tasks:
            raise ValueError(f"row = {row} cannot be; valid: 0 .. {self.num_tasks - 1}, or -1 for before training")
        counts = {
            "correct": self.correct[..., row, :] if row >= 0 else self.initial_correct,
            "total": self.total[..., row, :] if row >= 0 else self.initial_total,
        }
        # From the CPU: a process without a share may not have counted on its accelerator yet.
        own = _chosen(clients)
        sums = processes.add_up({name: values[own].cpu() for name, values in counts.items()})
        for name, values in counts.items():
            values[own] = sums[name].to(values.device)

    def compute(self) -> Tensor:
        """The accuracy matrix.

        Returns:
            ``[T, T]``, or ``[C, T, T]`` for personal models: percent, float64, on the CPU; NaN where nothing was
            counted.

        Raises:
            ValueError: more correct answers than answers were counted somewhere.
        """
        return _percent(self.correct, self.total)

    def _wrap_compute(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        wrapped = super()._wrap_compute(compute)  # makes a scalar of the matrix of a single task
        return wraps(compute)(lambda: wrapped().reshape(self.total.shape))

    def initial(self) -> Tensor:
        """Accuracies before any training, ``[T]`` or ``[C, T]``, otherwise as :meth:`compute`."""
        return _percent(self.initial_correct, self.initial_total)

    def summary(self, after: int | None = None) -> dict[str, float | None]:
        """The figures of :data:`FORMULAS`, ready for JSON.

        For personal models each figure is computed per client, over the tasks that it holds, and then averaged over the
        clients for which it is defined; three more keys describe the spread of ACC over these clients:
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

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torchmetrics would take a state of any shape, keep it where the checkpoint lay, share its memory, and
        # say nothing of a state that is missing.
        for name, default in self._defaults.items():
            key = prefix + name
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != default.shape:  # type: ignore[union-attr]
                found, wanted = list(state_dict.pop(key).shape), list(default.shape)  # type: ignore[union-attr]
                error_msgs.append(f"{key} is {found} in the checkpoint, {wanted} here: other tasks or clients")
            else:
                state_dict[key] = state_dict[key].to(self.device, torch.int64, copy=True)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _chosen(clients: Sequence[int] | None) -> Any:
    """An index for the rows of these clients, or for everything."""
    return ... if clients is None else list(clients)


def _percent(correct: Tensor, total: Tensor) -> Tensor:
    # On the CPU: some accelerators have no float64, and the readers are tables and pictures.
    correct, total = correct.cpu(), total.cpu()
    if bool((correct > total).any()) or bool((correct < 0).any()):
        raise ValueError("more correct answers than answers were counted, or fewer than none")
    return (100.0 * correct.double() / total.double()).masked_fill(total == 0, math.nan)


def _defined(value: Tensor) -> float | None:
    return None if math.isnan(value) else value.item()
