"""Squared gradients of single layers' weights, summed over samples, from inputs a and output gradients d.

- linear: ``sum_b (d_b a_b^T)^2 = (d^2)^T (a^2)``, one product of squares;
- convolution: ``sum_b (d_b U(a_b)^T)^2`` with the unfolded input ``U(a_b) [C kh kw, L]``, some samples at a time;
- BatchNorm with given statistics: ``sum_b (sum_l d_bl x_bl)^2`` with the normalised input x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 2**22  # numbers that may be held at once for samples' own gradients: 16 MB of float32


def linear_squares(a: Tensor, d: Tensor, weight: bool) -> tuple[Tensor | None, Tensor]:
    """Inputs ``[B, ..., i]`` and output gradients ``[B, ..., o]`` to sums ``[o, i]`` and ``[o]``."""
    if a.ndim == 2:
        squares = d.square()
        return (squares.T @ a.square() if weight else None), squares.sum(0)
    a, d = a.flatten(1, -2), d.flatten(1, -2)  # a sample's gradient is a sum over its positions
    of_bias = d.sum(1).square().sum(0)
    if not weight:
        return None, of_bias
    total = a.new_zeros(d.shape[-1], a.shape[-1])
    for some in chunks(len(a), d.shape[-1] * a.shape[-1]):
        total += (d[some].mT @ a[some]).square_().sum(0)
    return total, of_bias


def convolution_squares(module: nn.Conv2d, a: Tensor, d: Tensor, weight: bool) -> tuple[Tensor | None, Tensor]:
    """Inputs ``[B, C, H, W]`` and output gradients ``[B, O, h, w]`` to sums of the weight's and bias's size."""
    d = d.flatten(2)
    of_bias = d.sum(2).square().sum(0)
    if not weight:
        return None, of_bias
    geometry: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
    groups, columns = module.groups, module.weight[0].numel()
    total = a.new_zeros(groups, d.shape[1] // groups, columns)
    for some in chunks(len(a), max(total.numel(), groups * columns * d.shape[2])):
        patches = F.unfold(a[some], *geometry).unflatten(1, (groups, columns))
        total += (d[some].unflatten(1, (groups, -1)) @ patches.mT).square_().sum(0)
    return total, of_bias


def normalisation_squares(a: Tensor, d: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients ``[B, C, ...]`` to sums ``[C]`` and ``[C]``."""
    shape = (1, -1, *[1] * (a.ndim - 2))
    normalised = (a - mean.view(shape)) / deviation.view(shape)
    scales, shifts = ((d * factor).reshape(*a.shape[:2], -1).sum(2) for factor in (normalised, 1))
    return scales.square().sum(0), shifts.square().sum(0)


def chunks(samples: int, numbers: int) -> Iterator[slice]:
    """Slices of samples, so that ``numbers`` for each of them stay below the limit."""
    step = max(1, CHUNK // max(1, numbers))
    for start in range(0, samples, step):
        yield slice(start, start + step)
