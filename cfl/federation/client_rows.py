"""One row of values per client and dtype, in memory or in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.federation.row_layout import RowLayout, dtype_name
from cfl.federation.row_store import FileRows, MemoryRows

_BYTES_AT_ONCE = 1 << 24


class ClientRows:
    """The same named tensors for several clients: one row per client, in the order in which clients were first written.

    Args:
        layout: names, dtypes and shapes of one client's tensors.

    Attributes:
        count: number of clients.
    """

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.count = 0
        self._memory = {dtype: MemoryRows(width, dtype) for dtype, width in layout.widths.items()}
        self._files: dict[torch.dtype, FileRows] = {}
        self._row_of = np.full(0, -1)

    @property
    def on_disk(self) -> bool:
        """Whether the rows are in files."""
        return bool(self._files)

    @property
    def _stores(self) -> Mapping[torch.dtype, MemoryRows | FileRows]:
        return self._files or self._memory

    @property
    def bytes(self) -> int:
        """Size of all rows."""
        return self.count * self.layout.row_bytes

    @property
    def clients(self) -> np.ndarray:
        """Ids in the order of their rows, ``[n]`` int64."""
        ids = np.flatnonzero(self._row_of >= 0)
        return ids[np.argsort(self._row_of[ids])]

    def rows_of(self, clients: Sequence[int] | np.ndarray) -> np.ndarray:
        """Row of each client, ``[k]`` int64, -1 for one that has none."""
        ids = np.asarray(clients, dtype=np.int64)
        known = ids < len(self._row_of)
        rows = np.full(len(ids), -1)
        rows[known] = self._row_of[ids[known]]
        return rows

    def write(self, clients: Sequence[int] | np.ndarray, rows: Mapping[torch.dtype, Tensor]) -> None:
        """Store rows (dtype -> ``[k, width]``) for k distinct clients, as a copy."""
        ids, places = np.asarray(clients, dtype=np.int64), self.rows_of(clients)
        new = places < 0
        places[new] = np.arange(self.count, self.count + new.sum())
        for dtype, values in rows.items():
            self._stores[dtype].write(places, values)
        # Registered last, so that no client is listed with a row that could not be written.
        more = int(ids.max(initial=-1)) + 1 - len(self._row_of)
        if more > 0:
            self._row_of = np.concatenate([self._row_of, np.full(max(more, len(self._row_of)), -1)])
        self._row_of[ids] = places
        self.count += int(new.sum())

    def read_rows(self, rows: np.ndarray) -> dict[torch.dtype, Tensor]:
        """Rows ([k] int64, as from :meth:`rows_of`) by dtype, ``[k, width]``, new memory."""
        return {dtype: store.read(rows) for dtype, store in self._stores.items()}

    def read(self, rows: np.ndarray) -> dict[str, Tensor]:
        """The same rows as :meth:`read_rows`, as tensors ``[k, ...]`` by name."""
        return self.layout.unpack(self.read_rows(rows))

    def move_to_disk(self, folder: Path | None) -> None:
        """Move all rows to files, one per dtype, in ``folder`` (None: the system's temporary folder)."""
        for dtype, store in self._memory.items():
            file = self._files[dtype] = FileRows(self.layout.widths[dtype], dtype, folder)
            for some in np.array_split(np.arange(self.count), -(-self.bytes // _BYTES_AT_ONCE) or 1):
                file.write(some, store.read(some))
        self._memory.clear()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`cfl.federation.client_states.ClientStates.state_dict`."""
        clients = self.clients
        if self.on_disk:
            rows = {dtype_name(dtype): file.first(self.count) for dtype, file in self._files.items()}
        else:
            clients = np.sort(clients)
            places = self.rows_of(clients)
            rows = {dtype_name(dtype): store.read_to_cpu(places) for dtype, store in self._memory.items()}
        return {"clients": torch.from_numpy(clients), "fields": self.layout.plain(), "rows": rows}
