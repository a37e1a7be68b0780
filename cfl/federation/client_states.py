"""Tensors that clients keep between rounds: read when a cohort starts, written back when its clients finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.federation.client_rows import ClientRows
from cfl.federation.row_layout import RowLayout, check_rows, dtype_name
from cfl.runtime import distributed


class ClientStates:
    """Named tensors of each client, grouped by topic.

    A topic, such as ``model``, has tensors of the same names and shapes for every client. For a client that has stored
    none, a default is returned. Each client has one row per topic. Rows stay in memory until all topics together would
    exceed a limit; the topic that would exceed it moves to a file. Values do not depend on where they are stored.

    Args:
        memory_limit: bytes that may be held in memory; None for any number.
        folder: where files go; None takes the system's temporary folder.
    """

    def __init__(self, memory_limit: int | None = None, folder: Path | None = None) -> None:
        self.memory_limit, self.folder = memory_limit, folder
        self._topics: dict[str, ClientRows] = {}
        self._changed: dict[str, set[int]] = {}

    def gather(self, topic: str, clients: Sequence[int], default: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the clients' tensors of a topic, stacked.

        Args:
            topic: name of the topic.
            clients: the k ids.
            default: name -> tensor for clients that have stored nothing yet.

        Returns:
            name -> ``[k, ...]``, new memory, on the default's device.

        Raises:
            TypeError: if the default of an entry is no tensor.
        """
        for name, tensor in default.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"clients' {topic!r}: the default of {name} is {type(tensor).__name__}, not a tensor")
        held = self._topics.get(topic)
        rows = np.full(len(clients), -1) if held is None else held.rows_of(clients)
        if held is None or (rows < 0).all():
            return {name: tensor.expand(len(clients), *tensor.shape).clone() for name, tensor in default.items()}
        missing = np.flatnonzero(rows < 0)
        stacked = held.read(np.where(rows < 0, rows.max(), rows))
        found = {}
        for name, tensor in default.items():
            found[name] = stacked[name].to(tensor.device)
            if len(missing):
                found[name][torch.from_numpy(missing).to(tensor.device)] = tensor.to(found[name].dtype)
        return found

    def scatter(
        self,
        topic: str,
        clients: Sequence[int],
        stacked: Mapping[str, Tensor],
        keep: Sequence[bool] | None = None,
    ) -> None:
        """Store row j of ``stacked`` (name -> ``[k, ...]``) for client ``clients[j]``, as a copy.

        With ``keep``, clients whose entry is False keep their stored tensors.

        Raises:
            ValueError: if there is not a row for each client, or if the topic's earlier tensors had other names, shapes
                or dtypes.
            TypeError: if it is no dict of tensors.
        """
        check_rows(f"clients' {topic!r}", stacked, len(clients))
        layout = RowLayout.of(stacked)
        rows = layout.pack(stacked)
        if keep is not None and not all(keep):
            kept = [row for row, wanted in enumerate(keep) if wanted]
            clients = [clients[row] for row in kept]
            rows = {dtype: values[kept] for dtype, values in rows.items()}
        self._write(topic, layout, clients, rows)
        self._changed.setdefault(topic, set()).update(clients)

    def _write(
        self, topic: str, layout: RowLayout, clients: Sequence[int] | np.ndarray, rows: Mapping[torch.dtype, Tensor]
    ) -> None:
        if not len(clients):
            return
        held = self._topics.setdefault(topic, ClientRows(layout))
        difference = held.layout.difference(layout)
        if difference is not None:
            raise ValueError(f"a client keeps other tensors of {topic!r} than before: {difference}")
        if list(layout.fields) != list(held.layout.fields):  # a row holds its tensors in the order of the topic's first
            rows = held.layout.pack(layout.unpack(rows))
        added = int((held.rows_of(clients) < 0).sum()) * layout.row_bytes
        in_memory = sum(other.bytes for other in self._topics.values() if not other.on_disk)
        if self.memory_limit is not None and not held.on_disk and in_memory + added > self.memory_limit:
            held.move_to_disk(self.folder)
        held.write(clients, rows)

    def holders(self, topic: str) -> list[int]:
        """The clients that have stored tensors of a topic, ascending."""
        held = self._topics.get(topic)
        return [] if held is None else sorted(held.clients.tolist())

    def any_holds(self, topic: str, clients: Sequence[int]) -> bool:
        """Whether any of some clients has stored tensors of a topic. It takes no longer the more clients there are."""
        held = self._topics.get(topic)
        return held is not None and bool((held.rows_of(clients) >= 0).any())

    def get(self, topic: str, client: int) -> dict[str, Tensor] | None:
        """One client's tensors, copied, or None if it has none."""
        held = self._topics.get(topic)
        if held is None or (row := held.rows_of([client]))[0] < 0:
            return None
        return {name: values[0] for name, values in held.read(row).items()}

    def synchronise(self) -> None:
        """Send the states changed since the last call to all processes, so that every process holds all states.

        Another process may then train the client in the next round. All processes must call this; each sends the states
        of its own clients of the round to all others.
        """
        changed = {topic: sorted(clients) for topic, clients in self._changed.items() if clients}
        self._changed.clear()
        if distributed.count() == 1:
            return
        layouts = {topic: self._topics[topic].layout for topic in changed}
        of_all = distributed.gather((changed, {topic: layout.plain() for topic, layout in layouts.items()}))
        own = {}
        for topic, clients in changed.items():
            rows = self._topics[topic].read_rows(self._topics[topic].rows_of(clients))
            own[topic, distributed.rank()] = {dtype_name(dtype): values for dtype, values in rows.items()}
        shared = distributed.share_out(own)
        for source, (theirs, plain) in enumerate(of_all):
            if source == distributed.rank():
                continue
            for topic, clients in theirs.items():
                layout, message = RowLayout.from_plain(plain[topic]), shared[topic, source]
                self._write(topic, layout, clients, {d: message[dtype_name(d)] for d in layout.widths})

    def bytes(self) -> int:
        """Size of all stored tensors, in memory and in files."""
        return sum(held.bytes for held in self._topics.values())

    def on_disk(self, topic: str) -> bool:
        """Whether a topic is held in a file."""
        return topic in self._topics and self._topics[topic].on_disk

    def state_dict(self) -> dict[str, Any]:
        """All stored tensors, for a checkpoint.

        Returns:
            topic -> ``clients`` (``[n]`` int64 ids), ``fields`` (name -> [dtype, shape]) and ``rows`` (dtype ->
            ``[n, width]``, row j of client ``clients[j]``: its tensors of that dtype, flattened and concatenated in the
            order of ``fields``). For a topic in memory, clients ascend and rows are copies. For a topic in a file, rows
            are in the file's order and are not copied, so that saving them takes no memory.
        """
        return {topic: held.state_dict() for topic, held in self._topics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of :meth:`state_dict`; topics that exceed the memory limit go to files."""
        self._topics, self._changed = {}, {}
        for topic, held in state.items():
            layout = RowLayout.from_plain(held["fields"])
            rows = {dtype: held["rows"][dtype_name(dtype)] for dtype in layout.widths}
            self._write(topic, layout, held["clients"].numpy(), rows)
