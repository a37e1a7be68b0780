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
        # In float32 at least: squares of half precision overflow above 256, and vanish below 0.0002.
        wide = (g.reshape(len(g), -1).to(torch.promote_types(g.dtype, torch.float32)) for g in gradients)
        norms = torch.stack([rows.square().sum(1) for rows in wide]).sum(0).sqrt()
        factors = (limit / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))
