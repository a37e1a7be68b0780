"""Features: the inputs of a network's output layer, for given parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cfl.models.base import Network
from cfl.models.functional import call_with


def features_of(network: Network, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Features ``[B, d]`` of images ``[B, C, H, W]``, with the network in its current mode.

    Args:
        network: the architecture.
        tensors: parameters and buffers by name; for missing ones the network's own are used.
        x: the images.
    """
    return call_with(network, tensors, lambda x: network.features(x.to(network.head.weight.dtype)), x)


def unit_features(network: Network, tensors: Mapping[str, Tensor], x: Tensor, mirrored: bool = False) -> Tensor:
    """Features of length 1 ``[B, d]``; with ``mirrored``, means over image and mirror image, scaled to length 1.

    Arguments as for :func:`features_of`.
    """
    unit = torch.nn.functional.normalize(features_of(network, tensors, x), dim=1)
    if mirrored:
        other = torch.nn.functional.normalize(features_of(network, tensors, x.flip(-1)), dim=1)
        unit = torch.nn.functional.normalize(unit + other, dim=1)
    return unit
