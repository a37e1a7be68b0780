"""Rows in memory: the memory that they take, and their device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cfl.federation import row_store
from cfl.federation.row_store import MemoryRows


def test_memory_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have at most twice the rows needed, and rows keep their values while memory grows."""
    monkeypatch.setattr(row_store, "_BLOCK_BYTES", 8 * 4 * 10)
    store, written = MemoryRows(10, torch.float32), torch.arange(300.0).view(30, 10)
    for count in range(1, 31):
        store.write(np.array([count - 1]), written[count - 1 : count])
        sizes = [len(block) for block in store._blocks]
        assert sizes[:-1] == [8] * (len(sizes) - 1)
        assert sizes[-1] <= min(8, 2 * (count - 8 * (len(sizes) - 1)))
        assert torch.equal(store.read(np.arange(count)), written[:count])


def test_many_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "_BLOCK_BYTES", 8 * 4 * 10)
    store, written = MemoryRows(10, torch.float32), torch.arange(300.0).view(30, 10)
    order = np.random.default_rng(0).permutation(30)
    store.write(order[:3], written[order[:3]])
    store.write(order, written[order])
    assert torch.equal(store.read(np.arange(30)), written)


def test_rows_go_to_an_accelerator_and_stay_there() -> None:
    """Rows written later from the CPU do not move others back from an accelerator. The meta device stands for it."""
    store = MemoryRows(4, torch.float32)
    store.write(np.array([0]), torch.ones(1, 4))
    store.write(np.array([1]), torch.ones(1, 4, device="meta"))
    store.write(np.array([2]), torch.ones(1, 4))
    assert {block.device.type for block in store._blocks} == {"meta"}


def test_an_accelerator_holds_few_rows_of_a_copy_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For checkpoints: a copy of all rows there would double the memory that clients take."""
    monkeypatch.setattr(row_store, "_BLOCK_BYTES", 8 * 4 * 10)
    store, there, read = MemoryRows(10, torch.float32), torch.arange(300.0).view(30, 10), []
    store.write(np.arange(30), torch.empty((30, 10), device="meta"))

    def some(rows: np.ndarray) -> torch.Tensor:
        read.append(len(rows))
        return there[rows]

    monkeypatch.setattr(store, "read", some)
    rows = np.random.default_rng(0).permutation(30)[:21]
    assert torch.equal(store.read_to_cpu(rows), there[rows])
    assert read == [8, 8, 5]
