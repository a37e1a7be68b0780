"""How strongly each direction of a basis is protected (SGP: Saha and Roy, AAAI 2023)."""

from __future__ import annotations

import torch
from torch import Tensor


def importance_of(values: Tensor, alpha: float) -> Tensor:
    """``(alpha + 1) sigma / (alpha sigma + max sigma)``, in [0, 1] (equation 2 in the authors' code).

    The largest direction has importance 1. With growing ``alpha`` all others approach 1 too, which is full protection.

    Args:
        values: ``[k]`` singular values sigma, at least 0, in any order.
        alpha: at least 0.
    """
    largest = values.max() if len(values) else values.new_zeros(())
    if largest <= 0:
        return torch.zeros_like(values)
    return (alpha + 1) * values / (alpha * values + largest)


def accumulated_importance(
    before: Tensor | None, basis: Tensor, old: int, moments: Tensor, values: Tensor, alpha: float
) -> Tensor:
    """Importance of a basis's directions after one more task, accumulated as in the authors' code.

    For this task, a direction o that the basis had before has the singular value ``sqrt(o^T C o)``; the directions that
    the task added have the singular values of its inputs outside the old basis. :func:`importance_of` all these values
    is the task's importance. For old directions it is added to their former importance, up to 1.

    Args:
        before: ``[old]`` importance so far, or None for the first task.
        basis: ``[d, k]``, its first ``old`` columns those of earlier tasks.
        old: number of columns before this task.
        moments: ``C [d, d]``, second moments of the task's inputs, float64.
        values: at least ``k - old`` singular values of the inputs outside the old basis, largest first.
        alpha: see :func:`importance_of`.

    Returns:
        ``[k]`` float64.
    """
    earlier = basis[:, :old].double()
    along = (earlier * (moments @ earlier)).sum(0).clamp(min=0).sqrt()
    importance = importance_of(torch.cat([along, values[: basis.shape[1] - old].to(along)]), alpha)
    if before is not None:
        importance[:old] = (importance[:old] + before.to(importance)).clamp(max=1)
    return importance
