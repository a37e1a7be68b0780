"""Accuracy, forgetting and transfer, computed from a matrix over tasks: that of accuracies, or of another measure.

``a[t, i]`` is the accuracy in percent on task ``i`` after learning task ``t``, both counted from 0, NaN where it
was not evaluated. ``b[i]`` is the accuracy on task ``i`` of the model before any training. A run with one personal
model per client has one such matrix per client: every function takes leading dimensions, ``[..., T, T]`` to
``[...]``, and never averages over them.

For tasks seen up to and including ``t``::

    ACC      mean over i <= t of a[t, i]
    FGT      mean over i < t of a[i, i] - a[t, i]                      FOT, eq (13); may be negative
    FGT max  mean over i < t of (max over j < t of a[j, i]) - a[t, i]  Fed-A-GEM, section 5.1; Chaudhry et al. 2018
             with the last row too (max over i <= j <= t), as in Fed-A-GEM's code: never negative
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


def last_evaluated(a: Tensor) -> int:
    """Return the index of the last row of ``a [..., T, T]`` in which any matrix has an entry.

    It is 0 if there is none: this row is then as undefined as every other.
    """
    evaluated = (~torch.isnan(a)).any(-1).reshape(-1, a.shape[-2]).any(0).nonzero()
    return int(evaluated[-1]) if len(evaluated) else 0


def _matrix_and_row(a: Tensor, after: int | None) -> tuple[Tensor, int]:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or not a.shape[-1] or not a.is_floating_point():
        raise ValueError(f"an accuracy matrix is floating point [..., T, T], got {a.dtype} {list(a.shape)}")
    if after is not None and not 0 <= after < a.shape[-1]:
        raise ValueError(f"after = {after} is no task of this matrix; valid: 0 .. {a.shape[-1] - 1}")
    return a.double(), last_evaluated(a) if after is None else after


def own_tasks(a: Tensor) -> Tensor:
    """Return ``[..., T]`` bool, the tasks over which means are taken.

    With leading dimensions, these are the tasks evaluated at any time; without, all tasks.

    Args:
        a: ``[..., T, T]``.
    """
    own = ~torch.isnan(a).all(-2)
    return own if a.ndim > 2 else torch.ones_like(own)


def mean_over(terms: Tensor, own: Tensor) -> Tensor:
    """Return the mean ``[...]`` of ``terms [..., n]`` where ``own [..., n]``; NaN without terms or if one is NaN."""
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
    return mean_over(a[..., t, : t + 1], own_tasks(a)[..., : t + 1])


def forgetting(a: Tensor, after: int | None = None) -> Tensor:
    """FGT, diagonal form: ``mean_{i < t} (a[i, i] - a[t, i])`` (FOT, eq 13); negative when old tasks improved.

    Arguments, result (in points) and errors as for :func:`average_accuracy`; NaN for t = 0.
    """
    a, t = _matrix_and_row(a, after)
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
    if t == 0:
        return a.new_full(a.shape[:-2], math.nan)
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
    return 0.0 - forgetting(a, after)  # a negation would make -0.0 of 0.0


def forward_transfer(a: Tensor, initial: Tensor, after: int | None = None) -> Tensor:
    """FWT: ``mean_{1 <= i <= t} (a[i-1, i] - b[i])`` (Lopez-Paz and Ranzato 2017), the gain before learning a task.

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
    before_learning = a.diagonal(offset=1, dim1=-2, dim2=-1)[..., :t]
    return mean_over(before_learning - initial.to(a)[..., 1 : t + 1], own_tasks(a)[..., 1 : t + 1])


def transfers(a: Tensor, initial: Tensor, lower_is_better: bool, after: int | None = None) -> dict[str, Tensor]:
    """Return FGT, BWT and FWT of a matrix of accuracies or of another measure.

    FGT above 0 means that tasks became worse after they were learned; BWT and FWT above 0 mean that they became better.
    If lower values are better, the signs of all differences are therefore reversed::

        FGT  mean over i < t of a[t, i] - a[i, i]
        BWT  mean over i < t of a[i, i] - a[t, i]
        FWT  mean over 1 <= i <= t of b[i] - a[i-1, i]

    Args:
        a: ``[..., T, T]``, row t after learning task t, NaN where not evaluated.
        initial: ``[..., T]``, b, before any training.
        lower_is_better: whether lower values are better.
        after: the row t, 0 .. T-1; None takes the last row in which anything was evaluated.

    Returns:
        ``fgt``, ``bwt`` and ``fwt``, each ``[...]``, NaN where undefined.

    Raises:
        ValueError: ``a`` is not a floating point ``[..., T, T]``, ``initial`` not ``[..., T]`` or ``after`` not a row.
    """
    if lower_is_better:
        a, initial = -a, -initial
    return {
        "fgt": forgetting(a, after),
        "bwt": backward_transfer(a, after),
        "fwt": forward_transfer(a, initial, after),
    }
