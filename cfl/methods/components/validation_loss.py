"""The loss of one client's model on samples that it does not train on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl.metrics.measure import ACCURACY, Measure
from cfl.models.density import DensityNetwork, is_density
from cfl.models.functional import call_with


@torch.no_grad()
def validation_loss(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    outputs: Tensor | None = None,
    client: int = 0,
    measure: Measure = ACCURACY,
) -> float:
    """Mean over samples of the measure's loss, such as the cross-entropy; for a density network, of ``-log p(x)``.

    Args:
        network: images ``[B, C, H, W]`` to logits ``[B, O]``, in its current mode.
        tensors: parameters and buffers by name.
        batches: ``[B, C, H, W]`` inputs and ``[B]`` int64 output indices, or other targets.
        outputs: ``[O]`` bool, the outputs over which the softmax is taken, or None for all.
        client: the client's id, for density networks in which the same weights give each client another density.
        measure: the measure of the run.

    Raises:
        ValueError: no samples.
    """
    density = is_density(network)
    total, count = 0.0, 0
    for x, y in batches:
        if density:
            losses = -call_with(network, tensors, cast(DensityNetwork, network).log_likelihood, x, (client,))
        else:
            scores: Tensor = functional_call(network, dict(tensors), (x,))
            allowed = None if outputs is None else outputs.to(scores.device).expand_as(scores)
            losses = measure.losses(scores, y, allowed, x)
        total += losses.double().sum().item()
        count += len(x)
    if count == 0:
        raise ValueError("a validation loss of no samples")
    return total / count
