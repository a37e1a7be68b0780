"""Batches of test sets: they hold sample numbers, and the samples are added on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EvaluationBatch:
    """Consecutive test samples of one task; empty if a process has nothing to evaluate.

    Attributes:
        task: from 0.
        start: first sample.
        stop: one past the last sample.
        x: ``[B, C, H, W]`` network input, filled in on the device.
        y: ``[B]`` int64 output index, filled in on the device.
        owners: ``[B]`` int64, the client that owns each sample, filled in on the device; None if the data do not say.
    """

    task: int
    start: int
    stop: int
    x: Tensor | None = None
    y: Tensor | None = None
    owners: Tensor | None = None

    def to(self, device: torch.device | str) -> EvaluationBatch:
        """Return the batch itself: its samples are sliced from tensors that are already on the device."""
        return self


class EvaluationLoader:
    """A task's test set in order, ``batch_size`` samples at a time, or some of these batches.

    Args:
        task: from 0.
        size: number of test samples.
        batch_size: samples per batch.
        first: first batch to yield.
        every: step from one batch to yield to the next; 1 yields all.
    """

    def __init__(self, task: int, size: int, batch_size: int, first: int = 0, every: int = 1) -> None:
        self.task, self.size, self.batch_size = task, size, batch_size
        self._starts = range(first * batch_size, size, every * batch_size)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        for start in self._starts:
            yield EvaluationBatch(self.task, start, min(start + self.batch_size, self.size))


class NothingToEvaluate:
    """A loader with one empty batch, because Lightning calls no hooks of an evaluation without batches."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvaluationBatch]:
        yield EvaluationBatch(0, 0, 0)
