"""Tensors kept for test batches: by batch and name, within a memory limit, until the run loads another state."""

from __future__ import annotations

import pytest
import torch
from support.tiny import fit, tiny_client, tiny_data
from torch import Tensor

from cfl.data.evaluation import EvaluationBatch
from cfl.federation import repeated_tests
from cfl.federation.repeated_tests import RepeatedTests


class Counts:
    """Returns another tensor of 40 bytes at every call, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Tensor:
        self.calls += 1
        return torch.full((10,), float(self.calls))


def test_a_batch_is_computed_once_for_each_name() -> None:
    tests, compute = RepeatedTests(), Counts()
    for _ in range(2):
        for batch in (EvaluationBatch(0, 0, 10), EvaluationBatch(0, 10, 20), EvaluationBatch(1, 0, 10)):
            for name in ("a", "b"):
                with tests.of(batch):
                    tests.once(name, compute)
    assert compute.calls == 6
    with tests.of(EvaluationBatch(0, 10, 20)):
        assert tests.once("a", compute).tolist() == [3.0] * 10


def test_outside_of_tests_nothing_is_kept() -> None:
    tests, compute = RepeatedTests(), Counts()
    with tests.of(EvaluationBatch(0, 0, 10)):
        tests.once("a", compute)
    assert [tests.once("a", compute)[0].item() for _ in range(2)] == [2.0, 3.0]


def test_memory_is_bounded_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_tests, "MOST_BYTES", 80)
    tests, compute = RepeatedTests(), Counts()
    for _ in range(3):
        for start in (0, 10, 20):
            with tests.of(EvaluationBatch(0, start, start + 10)):
                tests.once("a", compute)
    assert compute.calls == 3 + 2
    tests.clear()
    for start in (20, 10, 20, 10):
        with tests.of(EvaluationBatch(0, start, start + 10)):
            tests.once("a", compute)
    assert compute.calls == 5 + 2


def test_a_run_that_goes_on_from_another_state_computes_anew() -> None:
    data, compute = tiny_data(), Counts()
    federation = fit(tiny_client(data), data)
    for _ in range(2):
        with federation.repeated_tests.of(EvaluationBatch(0, 0, 10)):
            federation.repeated_tests.once("a", compute)
        federation.load_state_dict(federation.state_dict())
    assert compute.calls == 2
