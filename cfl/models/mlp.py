"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from cfl.models.base import Network, dropout_rates
from cfl.runtime.option_checks import MOST_AT_ONCE, check_integers


class MLP(Network):
    """Fully connected network with ReLU and dropout after each hidden layer, all layers with biases.

    With the defaults on ``(1, 28, 28)`` images and 10 outputs it is the permuted-MNIST network of FOT (Bakman et
    al., ICLR 2024), 784-400-400-400-10: 638,810 parameters.

    Args:
        input_shape: ``(C, H, W)`` of one image; images are flattened.
        num_outputs: outputs of all tasks together.
        hidden: widths of the hidden layers, each >= 1; default ``[400, 400, 400]``. An empty list is softmax
            regression.
        dropout: probability in [0, 1) after each hidden layer, a list as long as ``hidden`` or one number for all;
            default 0.2 after the first and 0.5 after the others.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_outputs: int,
        hidden: list[int] | None = None,
        dropout: list[float] | float | None = None,
    ) -> None:
        super().__init__(input_shape, num_outputs)
        self.hidden = [400, 400, 400] if hidden is None else list(hidden)
        for width in self.hidden:
            check_integers("model.network", 1, at_most=MOST_AT_ONCE, hidden=width)
        self.dropout = dropout_rates(dropout, default=[0.2, *[0.5] * (len(self.hidden) - 1)][: len(self.hidden)])

        channels, height, width = self.input_shape
        widths = [channels * height * width, *self.hidden]
        self.layers = nn.ModuleList(nn.Linear(d, o) for d, o in pairwise(widths))
        self.dropouts = nn.ModuleList(nn.Dropout(rate) for rate in self.dropout)
        self.head = nn.Linear(widths[-1], num_outputs)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the last hidden layer ``[B, hidden[-1]]``."""
        x = x.flatten(1)
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            x = dropout(relu(layer(x)))
        return x
