"""Sending a few entries of a long vector: which ones, and what that costs."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def kept_entries(fraction: float, size: int) -> int:
    """``ceil(fraction * size)``, the fraction taken as it is written: 0.07 of 100 are 7.

    Raises:
        ValueError: for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction = {fraction}: a number in (0, 1]")
    return math.ceil(Fraction(str(fraction)) * size)


def largest(values: Tensor, fraction: float) -> Tensor:
    """The largest entries of each row, exactly :func:`kept_entries` of them; of equal ones, those that come first.

    Args:
        values: ``[..., n]``, without NaN.
        fraction: of the n entries, in (0, 1].

    Returns:
        ``[..., n]`` bool.

    Raises:
        ValueError: for a fraction outside (0, 1].
    """
    size = values.shape[-1]
    kept = kept_entries(fraction, size)
    if kept == size:
        return torch.ones_like(values, dtype=torch.bool)
    least = values.kthvalue(size - kept + 1, dim=-1, keepdim=True).values
    chosen = values > least
    equal = values == least
    free = kept - chosen.sum(-1, keepdim=True)
    return chosen | (equal & (equal.cumsum(-1) <= free))


def index_bytes(size: int) -> int:
    """Bytes that say which of ``size`` entries is meant: an int32 as long as it can, else an int64."""
    return 4 if size <= 2**31 else 8


def message_bytes(entries: int, size: int, value_bytes: int) -> int:
    """Bytes of a message that holds some entries of a vector, the others being zero.

    Args:
        entries: how many.
        size: of the whole vector.
        value_bytes: of what is sent for an entry, one value or several.

    Returns:
        ``entries * (value_bytes + index_bytes(size))``, or ``size * value_bytes`` where the whole vector takes less.
    """
    return min(entries * (value_bytes + index_bytes(size)), size * value_bytes)
