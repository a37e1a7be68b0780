"""Networks as users write them, to be varied in one thing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cfl.models.base import Network
from cfl.models.batchnorm import convert_batchnorm
from cfl.models.dropout import convert_dropout


class Plain(Network):
    """A linear layer and the head, for images (1, 4, 4)."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(16, num_outputs)
        self.make()

    def make(self) -> None:
        self.body: nn.Module = nn.Linear(16, 16)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x.flatten(1)))


class WithoutElements(Plain):
    """With parameters without elements, which change nothing."""

    def make(self) -> None:
        super().make()
        self.none, self.nobody = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 4))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.none.sum() + self.nobody.sum()


def as_global_model(make: type[Network]) -> Network:
    """A network for images (1, 4, 4) in the state in which a run holds its global model."""
    torch.manual_seed(0)
    network = convert_dropout(convert_batchnorm(make((1, 4, 4), 3)))
    network.requires_grad_(False)
    return network
