"""Puts the channels of images last in memory, which makes convolutions and pooling on a CPU faster."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call


def channels_last(x: Tensor) -> Tensor:
    """The same ``[B, C, H, W]`` numbers with the channels innermost in memory.

    With one channel both orders have the same memory layout, and torch assumes the usual one. Strides are set here so
    that the following layers keep channels last.
    """
    _, channels, height, width = x.shape
    if channels == 1:
        x = x.contiguous()
        return x.as_strided(x.shape, (height * width, 1, width, 1), x.storage_offset())
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def gains_by_channels_last(network: nn.Module, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> bool:
    """Whether passes without gradients should use :func:`channels_last` images like these.

    They should for a network with convolutions on a CPU, unless its forward pass fails with such images, for example
    because it calls ``view`` on a map.

    Args:
        network: in evaluation mode.
        x: ``[B, C, H, W]``, of which two samples are tried.
        tensors: parameters and buffers to try it with, by name; missing ones are the network's.
    """
    if x.ndim != 4 or x.device.type != "cpu" or not any(isinstance(m, nn.Conv2d) for m in network.modules()):
        return False
    try:
        functional_call(network, dict(tensors or {}), (channels_last(x[:2]),))
    except (RuntimeError, ValueError):
        return False
    return True
