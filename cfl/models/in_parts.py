"""Passes images through a network some hundred at a time, so that its maps fit the caches of a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SAMPLES = 250
"""Most samples in a part. Fewer are slower for small maps, more for large ones."""


def in_parts(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``compute(x)`` for x ``[B, ...]``, computed from at most :data:`SAMPLES` samples at a time.

    Parts are of nearly equal size: a rest of one sample fails in networks that remove dimensions of size one.
    """
    return torch.cat([compute(part) for part in x.tensor_split(-(-len(x) // SAMPLES))])


@torch.no_grad()
def gains_by_parts(network: nn.Module, x: Tensor) -> bool:
    """Whether passes without gradients should be made :func:`in_parts` for images like these.

    They should for a network with convolutions on a CPU, unless its outputs for a sample depend on the other samples,
    for example because it normalises with the statistics of the batch. This cannot be seen if all outputs are the same,
    such as those of a head of zeros. The whole batch is then passed at once.

    Args:
        network: in evaluation mode.
        x: ``[B, C, H, W]`` with at least four samples, of which four are tried.
    """
    if x.ndim != 4 or x.device.type != "cpu" or not any(isinstance(m, nn.Conv2d) for m in network.modules()):
        return False
    whole, halves = network(x[:4]), torch.cat([network(x[:2]), network(x[2:4])])
    if torch.equal(whole, whole[:1].expand_as(whole)):
        return False
    return bool((whole - halves).abs().max() <= 1e-4 * whole.abs().max())
