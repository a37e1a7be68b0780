"""Binary cross-entropy of classifiers with one independent output per class (iCaRL, GLFC)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.runtime.moving import moved


def mean_bce(logits: Tensor, target: Tensor, allowed: Tensor | None) -> Tensor:
    """``[..., N]`` binary cross-entropies with logits, each the mean over a sample's allowed outputs.

    Args:
        logits: ``[..., N, O]``.
        target: ``[..., N, O]`` in [0, 1].
        allowed: bool, of a shape that expands to that of ``logits``, or None for all outputs.
    """
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    if allowed is None:
        return each.mean(-1)
    allowed = moved(allowed, each.device).expand_as(each)
    return torch.where(allowed, each, torch.zeros_like(each)).sum(-1) / allowed.sum(-1)
