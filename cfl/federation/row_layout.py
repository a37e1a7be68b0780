"""Packs the named tensors of a client into one flat row per dtype, so that many clients fill a few large tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class RowLayout:
    """The position of each named tensor in a client's rows.

    Args:
        fields: name -> (dtype, shape of one client's tensor).

    Attributes:
        widths: dtype -> number of values in a client's row of that dtype.
    """

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.fields = dict(fields)
        self.widths: dict[torch.dtype, int] = {}
        self._starts: dict[str, int] = {}
        for name, (dtype, shape) in self.fields.items():
            self._starts[name] = self.widths.get(dtype, 0)
            self.widths[dtype] = self._starts[name] + math.prod(shape)

    @classmethod
    def of(cls, stacked: Mapping[str, Tensor]) -> RowLayout:
        """The layout for tensors ``[k, ...]`` by name, one client along the first axis."""
        return cls({name: (values.dtype, tuple(values.shape[1:])) for name, values in stacked.items()})

    @property
    def row_bytes(self) -> int:
        """Bytes of one client."""
        return sum(width * dtype.itemsize for dtype, width in self.widths.items())

    def difference(self, other: RowLayout) -> str | None:
        """Describe the first tensor in which two layouts differ; None if they are the same."""
        for name in sorted({*self.fields, *other.fields}):
            ours, theirs = self.fields.get(name), other.fields.get(name)
            if ours != theirs:
                return f"{name!r} is {_described(ours)} here and {_described(theirs)} there"
        return None

    def pack(self, stacked: Mapping[str, Tensor]) -> dict[torch.dtype, Tensor]:
        """Tensors ``[k, ...]`` by name as rows ``[k, width]`` by dtype, new memory."""
        parts: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in self.widths}
        for name, (dtype, shape) in self.fields.items():
            values = stacked[name].detach()
            parts[dtype].append(values.reshape(len(values), math.prod(shape)))
        return {dtype: torch.cat(rows, dim=1) for dtype, rows in parts.items()}

    def unpack(self, rows: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """Rows ``[k, width]`` by dtype as tensors ``[k, ...]`` by name: views."""
        found = {}
        for name, (dtype, shape) in self.fields.items():
            values, start = rows[dtype], self._starts[name]
            found[name] = values[:, start : start + math.prod(shape)].view(len(values), *shape)
        return found

    def plain(self) -> dict[str, list[Any]]:
        """Name -> [dtype, shape] in plain values, for a checkpoint."""
        return {name: [dtype_name(dtype), list(shape)] for name, (dtype, shape) in self.fields.items()}

    @classmethod
    def from_plain(cls, fields: Mapping[str, list[Any]]) -> RowLayout:
        """The layout that :meth:`plain` was called on."""
        return cls({name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in fields.items()})


def check_rows(who: str, stacked: Any, clients: int) -> None:
    """Refuse what is no dict of tensors with a row for each client.

    Args:
        who: whose tensors they are, for messages.
        stacked: name -> ``[k, ...]``.
        clients: number k of clients.

    Raises:
        TypeError: it is no mapping, or an entry is no tensor.
        ValueError: a tensor has another number of rows.
    """
    if not isinstance(stacked, Mapping):
        raise TypeError(f"{who}: {type(stacked).__name__}, not a dict of tensors [{clients}, ...] by name")
    for name, values in stacked.items():
        wanted = f"[{clients}, ...], a row for each client"
        if not isinstance(values, Tensor):
            raise TypeError(f"{who}: {name} is {type(values).__name__}, not a tensor {wanted}")
        if values.shape[:1] != (clients,):
            raise ValueError(f"{who}: {name} has shape {list(values.shape)}, not {wanted}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _described(field: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "absent" if field is None else f"{field[0]} {list(field[1])}"
