"""Sparse vectors: chooses the largest entries, counts the bytes to send them, and stores and adds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


def kept_entries(fraction: float, size: int) -> int:
    """``ceil(fraction * size)`` with the decimal value of the fraction: 0.07 of 100 is exactly 7."""
    return math.ceil(Fraction(str(fraction)) * size)


def largest(values: Tensor, fraction: float) -> Tensor:
    """The largest entries of each row, exactly :func:`kept_entries` of them; of equal ones, those that come first.

    Args:
        values: ``[..., n]``, without NaN.
        fraction: of the n entries, in (0, 1].

    Returns:
        ``[..., n]`` bool.
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
    """Bytes of an index into ``size`` entries: an int32 if it suffices, else an int64."""
    return 4 if size <= 2**31 else 8


def message_bytes(entries: int, size: int, value_bytes: int) -> int:
    """Bytes of a message that holds some entries of a vector, the others being zero.

    Args:
        entries: number of entries sent.
        size: length of the vector.
        value_bytes: bytes of one entry, of one value or several.

    Returns:
        ``entries * (value_bytes + index_bytes(size))``, or ``size * value_bytes`` where the whole vector takes less.
    """
    return min(entries * (value_bytes + index_bytes(size)), size * value_bytes)


class SparseRows:
    """Rows ``[J, n]`` with many zeros. The other entries are stored, or whole rows if these take less memory.

    Args:
        row: ``[e]`` int32, the row of each entry, in ascending order; None for whole rows.
        column: ``[e]`` int32, or int64 if n is too large for it; None for whole rows.
        values: ``[e]``, or ``[J, n]``.
        size: n.
    """

    def __init__(self, row: Tensor | None, column: Tensor | None, values: Tensor, size: int) -> None:
        self.row, self.column, self.values, self.size = row, column, values, size

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> SparseRows:
        """Make sparse rows of at least one dense row ``[n]``; all of one size and dtype, on one device."""
        size = rows[0].numel()
        value_bytes, place_bytes = rows[0].element_size(), index_bytes(size)
        entries = sum(int(torch.count_nonzero(values)) for values in rows)
        if entries * (value_bytes + place_bytes + 4) >= len(rows) * size * value_bytes:
            return cls(None, None, torch.stack(list(rows)), size)
        places = [values.nonzero().squeeze(1) for values in rows]
        index = torch.int32 if place_bytes == 4 else torch.int64
        row = torch.cat([torch.full_like(p, number, dtype=torch.int32) for number, p in enumerate(places)])
        values = torch.cat([values[p] for values, p in zip(rows, places, strict=True)])
        return cls(row, torch.cat(places).to(index), values, size)

    def dense(self, rows: int) -> Tensor:
        """``[rows, n]``; rows after the stored ones are zeros."""
        whole = self.values.new_zeros(rows, self.size)
        if self.row is None or self.column is None:
            whole[: len(self.values)] = self.values
        else:
            whole[self.row.long(), self.column.long()] = self.values
        return whole

    def combined(self, weights: Tensor) -> Tensor:
        """``sum_j weights_j row_j``, ``[n]``, on the device of the ``[J]`` weights."""
        values = self.values.to(weights.device)
        if self.row is None or self.column is None:
            return weights @ values
        column = self.column.to(weights.device)
        counts = torch.bincount(self.row, minlength=len(weights)).tolist()
        total = weights.new_zeros(self.size)
        for weight, its_columns, its_values in zip(
            weights.tolist(), column.split(counts), values.split(counts), strict=True
        ):
            total.index_add_(0, its_columns, its_values, alpha=weight)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"row": self.row, "column": self.column, "values": self.values, "size": self.size}
