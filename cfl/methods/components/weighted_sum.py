"""The sum of a step's losses, with padding left out."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted_sum(losses: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """``sum_i w_i loss_i`` ``[]`` over the samples in the mask; all ``[N]``.

    No product with the mask, because losses of padding may be infinite.
    """
    return torch.where(mask, weights.to(losses.dtype) * losses, torch.zeros_like(losses)).sum()
