"""The sum of a step's losses, with padding left out."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """``sum_i w_i loss_i`` ``[]`` over the samples in the mask; all ``[N]``. In float32 at least.

    No product with the mask, because losses of padding may be infinite.
    """
    weighted = weights.to(torch.promote_types(losses.dtype, torch.float32)) * losses
    return torch.where(mask, weighted, torch.zeros_like(weighted)).sum()
