"""``engine.matmul_precision`` applies to local steps only."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from support.tiny import fit, sgd, split, tiny_client, tiny_data, tiny_trainer
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import FedAGEM, Method
from cfl.models import Network

Precision = Literal["highest", "high", "medium"]


SEEN: set[tuple[bool, str]] = set()
"""(training mode, precision) of the forward passes of a network and all its copies."""


class Notes(Network):
    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.fc, self.head = nn.Linear(16, 5), nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        SEEN.add((self.training, torch.get_float32_matmul_precision()))
        return torch.tanh(self.fc(x.flatten(1)))  # tanh makes it no chain of layers with a hand-written step


class Begins(Method):
    """Clears SEEN before the first local step, of the passes that chose and built the engine."""

    def start_clients(self, cohort: Cohort) -> None:
        if cohort.round == 0:
            SEEN.clear()


@pytest.mark.parametrize("outside", ["highest", "high"])
@pytest.mark.parametrize("within", ["highest", "medium"])
@pytest.mark.parametrize("kind", ["auto", "vmap", "workers"])
def test_steps_are_computed_as_asked_and_all_else_in_full(kind: Any, within: Precision, outside: str) -> None:
    torch.set_float32_matmul_precision(outside)
    try:
        data = tiny_data(split(2))
        options = EngineOptions(kind, matmul_precision=within)
        client = tiny_client(data, Notes, sgd, {"begins": Begins()}, options)
        fit(client, data)
        assert {precision for training, precision in SEEN if training} == {within}
        assert {precision for training, precision in SEEN if not training} == {"highest"}
        SEEN.clear()
        tiny_trainer(data).validate(client, datamodule=data, verbose=False)
        assert {(False, "highest")} == SEEN
        assert torch.get_float32_matmul_precision() == outside
    finally:
        torch.set_float32_matmul_precision("highest")


def test_references_between_rounds_are_computed_in_full() -> None:
    data = tiny_data(split(2))
    options = EngineOptions("vmap", matmul_precision="medium")
    client = tiny_client(data, Notes, sgd, {"begins": Begins(), "fed": FedAGEM(4)}, options)
    client.buffer = ReplayBuffer(4)
    fit(client, data)
    assert {precision for training, precision in SEEN if training} == {"medium", "highest"}


class Multiplies(Method):
    """Notes the precision of its own computations, and checks that of gradients that it requests."""

    def __init__(self) -> None:
        self.own: set[str] = set()
        self._batch: CohortBatch | None = None

    def begin_task(self, plan: RoundPlan) -> None:
        self._note()

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self._batch = batch
        return batch

    def penalty(self, cohort: Cohort) -> Tensor | None:
        self._note()
        return None

    def adjust_gradients(self, cohort: Cohort) -> None:
        self._note()
        assert self._batch is not None
        SEEN.clear()
        cohort.gradients_on(self._batch, "again")
        assert {precision for _, precision in SEEN} == {"medium"}

    def _note(self) -> None:
        self.own.add(torch.get_float32_matmul_precision())


def test_methods_compute_in_full_within_a_local_step() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        data, method = tiny_data(split(2)), Multiplies()
        fit(tiny_client(data, Notes, sgd, {"own": method}, EngineOptions("vmap", matmul_precision="medium")), data)
        assert method.own == {"highest"}
    finally:
        torch.set_float32_matmul_precision("highest")
