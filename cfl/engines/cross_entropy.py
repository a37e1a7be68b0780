"""Cross-entropies with their gradients by the logits, written out for hand-written steps."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.data.samples import Samples


def cross_entropies(logits: Tensor, y: Tensor, outputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each sample's cross-entropy, ``[...]``, and its gradient ``softmax(z) - onehot(y)``, ``[..., O]``.

    Args:
        logits: ``[..., O]``.
        y: ``[...]`` int64.
        outputs: ``[O]`` or ``[..., O]`` bool, outputs in the loss, or None for all.
    """
    if outputs is not None:
        logits = logits.masked_fill(~outputs, -torch.inf)
    log_p = torch.log_softmax(logits, -1)
    target = y.unsqueeze(-1)
    losses = log_p.gather(-1, target).squeeze(-1).neg_()
    gradient = log_p.exp_()
    gradient.scatter_add_(-1, target, gradient.new_full((1,), -1.0).expand_as(target))
    return losses, gradient


def mean_cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None, outputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the last batch axis, ``[...]``, and its gradient ``[..., B, O]``.

    Args:
        logits: ``[..., B, O]``.
        y: ``[..., B]`` int64.
        mask: ``[..., B]`` bool, samples in the mean, or None for all; a client without any has loss 0.
        outputs: ``[O]`` bool, outputs in the loss, or None for all.
    """
    losses, gradient = cross_entropies(logits, y, outputs)
    if mask is None:
        return losses.mean(-1), gradient.div_(y.shape[-1])
    wide = torch.promote_types(losses.dtype, torch.float32)  # half precision has not every number of samples
    share = (mask.to(wide) / mask.sum(-1, keepdim=True).clamp(min=1)).to(losses.dtype)
    return (losses * share).sum(-1), gradient.mul_(share.unsqueeze(-1))


def weighted_cross_entropy(logits: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """``sum_i w_i CE(z_i, y_i)`` over the last sample axis, ``[...]``, and its gradient ``[..., N, O]``.

    Args:
        logits: ``[..., N, O]``.
        samples: of the same samples.
    """
    losses, gradient = cross_entropies(logits, samples.y, samples.allowed)
    weights = samples.weights.to(torch.promote_types(losses.dtype, torch.float32))
    losses = torch.where(samples.mask, losses * weights, torch.zeros_like(weights))
    return losses.sum(-1), gradient.mul_(torch.where(samples.mask, weights, torch.zeros_like(weights)).unsqueeze(-1))
