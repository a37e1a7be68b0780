"""Clips every client's gradient by itself."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def clip_clients(gradients: Collection[Tensor], limit: float, by_value: bool) -> None:
    """Clip the gradients of clients that are trained side by side, in place.

    Args:
        gradients: ``[k, ...]`` of each parameter.
        limit: greatest norm of a client's gradient over all parameters, or greatest absolute value.
        by_value: whether ``limit`` is that of each value.
    """
    if by_value:
        for gradient in gradients:
            gradient.clamp_(-limit, limit)
    elif gradients:
        norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients]).sum(0).sqrt()
        factors = (limit / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))
