"""A compact form of the clients' shares: one flat array for all clients instead of an array per client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np


class Shares(Sequence[np.ndarray]):
    """A sequence of shares of samples; ``shares[i]`` is a view of share ``i``.

    Memory is 8 bytes per sample and 8 per share; an array object per share would add more than 100.

    Args:
        samples: ``[M]`` int64, all shares one after another.
        offsets: ``[C + 1]`` int64, not descending, from 0 to M: share ``i`` is ``samples[offsets[i]:offsets[i + 1]]``.
    """

    def __init__(self, samples: np.ndarray, offsets: np.ndarray) -> None:
        self.samples, self.offsets = samples, offsets

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Shares:
        """The same shares as ``parts``, copied."""
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, dtype=np.int64), *parts]), offsets)

    @property
    def sizes(self) -> np.ndarray:
        """Samples in each share, ``[C]`` int64."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Shares:
        """The shares at ``rows`` ([m] int64), in that order, copied."""
        sizes = self.sizes[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        return Shares(self.samples[np.repeat(self.offsets[rows], sizes) + within], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        return self.samples[self.offsets.item(row) : self.offsets.item(row + 1)]


class ClientShares(Mapping[int, np.ndarray]):
    """Maps client ids to views of the clients' samples, for the clients that hold one task.

    Args:
        clients: ``[m]`` int64 ids, ascending.
        shares: their samples.
        rows: ``[m]`` int64, position of each client's share; None where client ``clients[i]`` has share ``i``.
    """

    def __init__(self, clients: np.ndarray, shares: Shares, rows: np.ndarray | None = None) -> None:
        self.clients, self.shares = clients, shares
        self._row_of = np.full(1 + int(clients.max(initial=-1)), -1, dtype=np.int32)
        self._row_of[clients] = np.arange(len(clients)) if rows is None else rows

    def only(self, clients: np.ndarray) -> ClientShares:
        """The same shares of some of the clients, ``[n]`` int64 ids, ascending."""
        return ClientShares(clients, self.shares, self._row_of[clients])

    @property
    def sizes(self) -> np.ndarray:
        """Samples of each client, ``[m]`` int64, in the order of :attr:`clients`."""
        return self.shares.sizes[self._row_of[self.clients]]

    def dealt(self, start: int, stop: int) -> Shares:
        """The shares of ``clients[start:stop]``, copied."""
        return self.shares.take(self._row_of[self.clients[start:stop]])

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __getitem__(self, client: int) -> np.ndarray:
        row = self._row_of.item(client) if 0 <= client < len(self._row_of) else -1
        if row < 0:
            raise KeyError(client)
        return self.shares[row]


def share_sizes(indices: Mapping[int, np.ndarray]) -> np.ndarray:
    """Samples of each client, ``[m]`` int64, in the order of ``indices``."""
    if isinstance(indices, ClientShares):
        return indices.sizes
    return np.fromiter(map(len, indices.values()), dtype=np.int64, count=len(indices))
