"""A cache of what evaluations compute from test batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from cfl.data.evaluation import EvaluationBatch

MOST_BYTES = 256 * 2**20
"""Limit for all tensors that an object keeps. A tensor that would exceed it is computed in every evaluation."""


class RepeatedTests:
    """Keeps tensors of test batches until it is cleared. All evaluations of a run have the same batches.

    The tensors stay on the device on which they were computed. Checkpoints do not hold them.
    """

    def __init__(self) -> None:
        self._batch: tuple[int, int, int] | None = None
        self._kept: dict[tuple[str, tuple[int, int, int]], Tensor] = {}
        self._bytes = 0

    @contextmanager
    def of(self, batch: EvaluationBatch) -> Iterator[None]:
        """Within the context, :meth:`once` keeps tensors for this batch."""
        self._batch = (batch.task, batch.start, batch.stop)
        try:
            yield
        finally:
            self._batch = None

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return ``compute()``, or its kept result from an earlier test of the same batch.

        Args:
            name: names the result.
            compute: its result may depend on the batch, and otherwise only on values that no longer change. Outside of
                :meth:`of` it is always called.
        """
        if self._batch is None:
            return compute()
        key = (name, self._batch)
        if key in self._kept:
            return self._kept[key]
        found = compute()
        if self._bytes + found.nbytes <= MOST_BYTES:
            self._kept[key] = found
            self._bytes += found.nbytes
        return found

    def clear(self) -> None:
        """Delete all kept tensors, because what they were computed with has changed."""
        self._kept.clear()
        self._bytes = 0
