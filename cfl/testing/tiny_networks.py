"""Networks with about a hundred weights, and networks in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn

from cfl.models import MLP, Network

NetworkFactory = Callable[[tuple[int, int, int], int], Network]
"""Makes a network from ``(C, H, W)`` of one image and the number of outputs."""

mlp: NetworkFactory = partial(MLP, hidden=[8], dropout=0.0)


class ConvNet(Network):
    """A convolution and a linear layer, optionally with BatchNorm, and the head: about 100 weights."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, norm: bool = False) -> None:
        super().__init__(input_shape, num_outputs)
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 2, 3)
        self.conv_norm = nn.BatchNorm2d(2) if norm else nn.Identity()
        self.fc = nn.Linear(2 * (height - 2) * (width - 2), 5)
        self.fc_norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.head = nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, 5]``."""
        x = torch.relu(self.conv_norm(self.conv(x)))
        return torch.relu(self.fc_norm(self.fc(x.flatten(1))))


norm_net: NetworkFactory = partial(ConvNet, norm=True)


def double(make: NetworkFactory) -> NetworkFactory:
    """A factory of the same network in float64, so that two computations can be compared to ten digits.

    Images may be float32, also those given to ``features`` alone."""

    def build(input_shape: tuple[int, int, int], num_outputs: int) -> Network:
        network = make(input_shape, num_outputs).double()
        kind = type(network)
        network.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        # A bound method, because a copy of the network gets one that is bound to the copy.
        network.features = MethodType(lambda self, x: kind.features(self, x.double()), network)  # type: ignore[method-assign]
        return network

    return build
