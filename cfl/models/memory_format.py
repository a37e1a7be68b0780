"""Images with their channels last in memory, as convolutions and pooling on a CPU are quickest."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def channels_last(x: Tensor) -> Tensor:
    """The same ``[B, C, H, W]`` numbers with the channels innermost in memory.

    With one channel both orders are the same memory, and torch takes it for the usual one: here its strides say
    otherwise, so that layers behind keep the order.
    """
    _, channels, height, width = x.shape
    if channels == 1:
        x = x.contiguous()
        return x.as_strided(x.shape, (height * width, 1, width, 1), x.storage_offset())
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def gains_by_channels_last(network: nn.Module, x: Tensor) -> bool:
    """Whether a network without gradients should be given :func:`channels_last` images like these.

    It should if it has convolutions on a CPU and can take them; a forward pass that takes ``view`` of a map cannot.

    Args:
        network: in evaluation mode.
        x: ``[B, C, H, W]``, of which two samples are tried.
    """
    if x.ndim != 4 or x.device.type != "cpu" or not any(isinstance(m, nn.Conv2d) for m in network.modules()):
        return False
    try:
        network(channels_last(x[:2]))
    except (RuntimeError, ValueError):
        return False
    return True
