"""Squared gradients of single layers' weights, summed over samples, from inputs a and output gradients d.

- linear: ``sum_b (d_b a_b^T)^2 = (d^2)^T (a^2)``, one product of squares;
- convolution: ``sum_b (d_b U(a_b)^T)^2`` with the unfolded input ``U(a_b) [C kh kw, L]``, some samples at a time;
- BatchNorm with given statistics: ``sum_b (sum_l d_bl x_bl)^2`` with the normalised input x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**22  # largest number of values held at once for per-sample gradients: 16 MB of float32
CACHED = 2**18  # the same for convolutions on a CPU: 1 MB of float32


def linear_squares(a: Tensor, d: Tensor, weight: bool) -> tuple[Tensor | None, Tensor]:
    """Sums ``[o, i]`` and ``[o]`` of squares, from inputs ``[B, ..., i]`` and output gradients ``[B, ..., o]``."""
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


class Convolution(NamedTuple):
    """Geometry of a convolution with zero padding: pairs for y and x, and the number of groups G."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def convolution_squares(of: Convolution, a: Tensor, d: Tensor, weight: bool) -> tuple[Tensor | None, Tensor]:
    """Sums of the weight's and bias's size, from inputs ``[B, C, H, W]`` and output gradients ``[B, O, h, w]``."""
    d = d.flatten(2)
    of_bias = d.sum(2).square().sum(0)
    if not weight:
        return None, of_bias
    groups, (height, width), outputs, inputs = of.groups, of.kernel_size, d.shape[1], a.shape[1] // of.groups
    columns = inputs * height * width
    channels_last = a.shape[1] > 1 and a.stride(1) == 1
    total = a.new_zeros(groups, outputs // groups, columns)
    for some in chunks(len(a), max(total.numel(), groups * columns * d.shape[2]), _convolution_chunk(a)):
        patches = unfolded(a[some], of, channels_last)
        total += (d[some].unflatten(1, (groups, -1)) @ patches).square_().sum(0)
    if channels_last:
        return total.view(outputs, height, width, inputs).permute(0, 3, 1, 2), of_bias
    return total.view(outputs, inputs, height, width), of_bias


def unfolded(a: Tensor, of: Convolution, channels_last: bool = False) -> Tensor:
    """The input patches that a convolution with zero padding multiplies its weight with.

    As ``torch.nn.functional.unfold``, by one strided copy, which takes a fifth of the time on a CPU.

    Args:
        a: ``[B, C, H, W]``.
        of: the convolution, of G groups.
        channels_last: the order of a group's inputs: ``(kh, kw, C / G)``, which is the quickest to copy where channels
            are last in memory too, instead of ``(C / G, kh, kw)``.

    Returns:
        ``[B, G, h w, C / G kh kw]``, the transpose of contiguous memory unless channels are last.
    """
    padding, groups = of.padding, of.groups
    (kernel_y, kernel_x), (step_y, step_x), (spread_y, spread_x) = of.kernel_size, of.stride, of.dilation
    if any(padding):
        a = F.pad(a, (padding[1], padding[1], padding[0], padding[0]))
    samples, channels, height, width = a.shape
    out_y = (height - spread_y * (kernel_y - 1) - 1) // step_y + 1
    out_x = (width - spread_x * (kernel_x - 1) - 1) // step_x + 1
    b, c, y, x = a.stride()
    inputs = channels // groups
    sides = {  # axis of the windows -> size and stride
        "sample": (samples, b),
        "group": (groups, inputs * c),
        "input": (inputs, c),
        "kernel y": (kernel_y, spread_y * y),
        "kernel x": (kernel_x, spread_x * x),
        "y": (out_y, step_y * y),
        "x": (out_x, step_x * x),
    }
    if channels_last:
        order = ("sample", "group", "y", "x", "kernel y", "kernel x", "input")
    else:
        order = ("sample", "group", "input", "kernel y", "kernel x", "y", "x")
    sizes, strides = zip(*(sides[name] for name in order), strict=True)
    windows = a.as_strided(sizes, strides)
    columns, positions = inputs * kernel_y * kernel_x, out_y * out_x
    if channels_last:
        return windows.reshape(samples, groups, positions, columns)
    return windows.reshape(samples, groups, columns, positions).mT


def normalisation_squares(a: Tensor, d: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Sums ``[C]`` for scales and ``[C]`` for shifts, from inputs and output gradients ``[B, C, ...]``."""
    shape = (1, -1, *[1] * (a.ndim - 2))
    normalised = (a - mean.view(shape)) / deviation.view(shape)
    scales, shifts = ((d * factor).reshape(*a.shape[:2], -1).sum(2) for factor in (normalised, 1))
    return scales.square().sum(0), shifts.square().sum(0)


def _convolution_chunk(a: Tensor) -> int:
    """Largest number of values at a time: what fits the caches on a CPU, more on an accelerator."""
    return min(CHUNK, CACHED) if a.device.type == "cpu" else CHUNK


def chunks(samples: int, numbers: int, limit: int | None = None) -> Iterator[slice]:
    """Slices of samples, so that ``numbers`` for each of them stay below the limit, by default ``CHUNK``."""
    step = max(1, (CHUNK if limit is None else limit) // max(1, numbers))
    for start in range(0, samples, step):
        yield slice(start, start + step)
