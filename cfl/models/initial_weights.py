"""Initial weights that differ from PyTorch's defaults."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_CUT = 0.87962566103423978
"""Standard deviation of a standard normal distribution cut at two deviations."""


def variance_scaled(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """New values of mean 0 and variance ``1 / n`` for a tensor: a normal distribution cut at two deviations.

    This is TensorFlow's variance scaling. n is the number of inputs of each output: ``I * ...`` for ``[O, I, ...]``, n
    for a vector of n entries. FedWeIT's code initialises weights, masks, biases and attention with it.

    Args:
        values: tensor whose shape, type and device the result has.
        generator: on the CPU; None is the global one.
    """
    inputs = values[0].numel() if values.ndim > 1 else len(values)
    deviation = 1 / math.sqrt(max(inputs, 1)) / _CUT
    drawn = torch.empty(values.shape, dtype=values.dtype)
    if drawn.numel():
        nn.init.trunc_normal_(drawn, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator)
    return drawn.to(values.device)
