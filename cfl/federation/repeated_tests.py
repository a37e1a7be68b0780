"""What tests have computed of the same samples before, for methods that freeze what they compute it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from cfl.data.evaluation import EvaluationBatch

MOST_BYTES = 256 * 2**20


class RepeatedTests:
    """Keeps tensors of test batches from one evaluation of a run to the next; every evaluation has the same batches.

    They are on the device of the tests. Checkpoints do not hold them.

    Args:
        most_bytes: of all tensors that are kept. Once they are reached, those of other batches are computed every time.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._batch: tuple[int, int, int] | None = None
        self._kept: dict[tuple[str, tuple[int, int, int]], Tensor] = {}
        self._bytes = 0

    @contextmanager
    def of(self, batch: EvaluationBatch) -> Iterator[None]:
        """Within the context, this batch is tested."""
        self._batch = (batch.task, batch.start, batch.stop)
        try:
            yield
        finally:
            self._batch = None

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, or what it returned under this name when the same batch was tested before.

        Args:
            name: of what is computed.
            compute: depends on the batch and on nothing that still changes. Outside of tests it is always called.
        """
        if self._batch is None:
            return compute()
        key = (name, self._batch)
        if key in self._kept:
            return self._kept[key]
        found = compute()
        if self._bytes + found.nbytes <= self.most_bytes:
            self._kept[key] = found
            self._bytes += found.nbytes
        return found

    def clear(self) -> None:
        """Forget everything, for a run that goes on from another state."""
        self._kept.clear()
        self._bytes = 0
