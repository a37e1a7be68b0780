"""A stream in which every task of every client is a separate task."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cfl.data.sources.base import Source
from cfl.data.streams.base import Stream
from cfl.data.types import Task


def stream_of_clients(stream: Stream, order: np.ndarray) -> Stream:
    """Return the stream whose task ``c T + t`` is client c's t-th; it repeats tasks that several clients learn.

    Args:
        stream: the stream whose tasks the clients learn.
        order: ``[C, T]`` int64, the number in ``stream`` of each client's t-th task.
    """
    return _OfClients(stream, order)


class _OfClients(Stream):
    """See :func:`stream_of_clients`. Repeated tasks share their images."""

    def __init__(self, stream: Stream, order: np.ndarray) -> None:
        self._stream, self._drawn = stream, order.ravel().tolist()
        self.name, self.shape, self.shared_labels = stream.name, stream.shape, stream.shared_labels
        self.num_tasks = len(self._drawn)
        self.classes_per_task = [stream.classes_per_task[task] for task in self._drawn]

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`."""
        whole = self._stream.tasks(root, seed)
        return [whole[task] for task in self._drawn]

    def source_of(self, task: int) -> Source | None:
        """See :meth:`Stream.source_of`."""
        return self._stream.source_of(self._drawn[task])

    def class_names(self, root: Path, seed: int) -> list[tuple[str, ...]]:
        """See :meth:`Stream.class_names`."""
        names = self._stream.class_names(root, seed)
        return [names[task] for task in self._drawn]

    @property
    def unlike_published(self) -> list[str]:
        """See :attr:`Stream.unlike_published`."""
        return self._stream.unlike_published
