"""Uniform and normal numbers and choices, computed as hashes of a counter; see :mod:`cfl.randomness.counter_bits`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cfl.randomness.counter_bits import random_words

_LOW = (1 << 32) - 1


def uniforms(keys: Tensor, count: int) -> Tensor:
    """``[k]`` int64 keys to ``[k, count]`` float64 numbers in (0, 1), two from each word.

    Number j of a key is the same whatever ``count`` and the other keys are.
    """
    words = random_words(keys, -(-count // 2))
    halves = torch.stack([words & _LOW, (words >> 32) & _LOW], -1).flatten(1)[:, :count]
    return halves.double().add_(0.5).mul_(2.0**-32)


def normals(keys: Tensor, count: int) -> Tensor:
    """``[k]`` int64 keys to ``[k, count]`` float32 numbers of the standard normal distribution (Box and Muller, 1958).

    Number j of a key is the same whatever ``count`` and the other keys are. Their absolute values are below 6.8.
    """
    pairs = -(-count // 2)
    words = random_words(keys, pairs)
    # Single precision from here on, because it is faster. All 32 bits matter only near 0, where u is exact.
    u = ((words & _LOW).float() + 0.5).mul_(2.0**-32)
    angle = ((words >> 32) & _LOW).float().mul_(2 * math.pi * 2.0**-32)
    radius = u.clamp_(max=1.0).log_().mul_(-2.0).clamp_(min=0.0).sqrt_()
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :count]


def choices(keys: Tensor, options: Tensor, count: int) -> Tensor:
    """``[k]`` int64 keys to ``[k, count]`` int64, each one of ``options [n]`` with equal probability.

    Number j of a key is the same whatever ``count`` and the other keys are.
    """
    return options[uniforms(keys, count).mul_(len(options)).long().clamp_(max=len(options) - 1)]
