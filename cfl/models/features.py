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

    They are float32 at least: in half precision features of 0 would become NaN. Arguments as for :func:`features_of`.
    """
    unit = _scaled(features_of(network, tensors, x))
    return _scaled(unit + _scaled(features_of(network, tensors, x.flip(-1)))) if mirrored else unit


def _scaled(features: Tensor) -> Tensor:
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    return torch.nn.functional.normalize(wide, dim=1)
