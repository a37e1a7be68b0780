"""Base class of matrices whose values are no means over samples: a row is computed when all its tests are known."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from cfl.metrics.task_matrix import TaskMatrix
from cfl.runtime import distributed

Place = tuple[int, ...]


class CollectedMatrix(TaskMatrix):
    """A matrix that collects what an evaluation finds, and computes the values from all of it in :meth:`add_up`.

    Arguments and errors as for :class:`TaskMatrix`.
    """

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        super().__init__(num_tasks, num_clients, torch.float64)
        self._seen: dict[Place, list[Any]] = {}

    def clear_row(self, row: int, clients: Sequence[int] | None = None) -> None:
        """See :meth:`TaskMatrix.clear_row`."""
        super().clear_row(row, clients)
        for place in self._of_row(row, clients):
            del self._seen[place]

    def add_up(self, row: int, clients: Sequence[int] | None = None) -> None:
        """Compute a row from what all processes have collected for it."""
        own = {place: self._seen.pop(place) for place in self._of_row(row, clients)}
        together: dict[Place, list[Any]] = {}
        for of_process in distributed.gather(own):
            for place, found in of_process.items():
                together.setdefault(place, []).extend(found)
        for place, found in together.items():
            self._set(place, found)

    @abstractmethod
    def _set(self, place: Place, found: list[Any]) -> None:
        """Set the value of one element of ``sums``, and 1 in ``counts`` if it is defined.

        Args:
            place: index of the element.
            found: what all processes have collected for it, at least one entry.
        """

    def _of_row(self, row: int, clients: Sequence[int] | None) -> list[Place]:
        line = self._row(row)
        return [
            place
            for place in self._seen
            if place[-2] == line and (clients is None or self.num_clients is None or place[0] in clients)
        ]
