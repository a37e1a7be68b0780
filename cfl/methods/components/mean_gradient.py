"""The gradient of a mean loss at a given model, outside of local steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.metrics.measure import Measure
from cfl.models.dropout import dropout_masks


class Labelled(NamedTuple):
    """Samples of one client.

    Attributes:
        x: ``[B, C, H, W]`` network input.
        y: ``[B]`` int64 output indices, or other targets.
        allowed: ``[B, O]`` or ``[O]`` bool, outputs in the loss, or None for all.
        masks: dropout masks by layer name, see :func:`cfl.models.dropout.dropout_masks`.
    """

    x: Tensor
    y: Tensor
    allowed: Tensor | None
    masks: Mapping[str, Tensor]


def mean_gradient(
    network: nn.Module, tensors: Mapping[str, Tensor], batches: Iterable[Labelled], measure: Measure
) -> dict[str, Tensor]:
    """Gradient of the mean loss over all samples, with the network in its current mode.

    Args:
        network: the architecture; its own tensors do not change.
        tensors: parameters and buffers by name.
        batches: at least one sample. Layers that depend on the batch, such as BatchNorm in training mode, use each
            batch by itself.
        measure: the measure with the loss, which must depend on outputs and targets alone.

    Returns:
        parameter name -> gradient, zero where the loss does not depend on it.
    """
    leaves = {n: tensors[n].detach().clone().requires_grad_() for n, _ in network.named_parameters()}
    buffers = {n: tensors[n].detach().clone() for n, _ in network.named_buffers()}
    total: dict[str, Tensor] = {}
    samples = 0
    for x, y, allowed, masks in batches:
        with torch.enable_grad(), dropout_masks(network, dict(masks)):
            logits: Tensor = functional_call(network, {**leaves, **buffers}, (x,))
            used = None if allowed is None else allowed.to(logits.device).expand_as(logits)
            measure.losses(logits, y, used, None).sum().backward()
        samples += len(y)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                # In float32 at least: sums of half precision stop growing after some hundred batches.
                gradient, leaf.grad = leaf.grad.to(torch.promote_types(leaf.dtype, torch.float32)), None
                total[name] = total[name].add_(gradient) if name in total else gradient
    return {
        n: (total[n] / samples).to(leaf.dtype) if n in total else torch.zeros_like(leaf) for n, leaf in leaves.items()
    }
