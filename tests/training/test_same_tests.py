"""Tasks that are tested on the same inputs share the global model's pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny import fit, permuted, split, tiny_client, tiny_data
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.sequences import FixedTasks
from cfl.federation.federation import Federation
from cfl.models import MLP

OWN = [[2, 0], [1, 2], [0, 1]]
DISTINCT, TASKS = 3, 6


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of samples in every pass of an MLP in evaluation mode."""
    found: list[int] = []
    forward = MLP.forward

    def counted(self: MLP, x: Tensor) -> Tensor:
        if not self.training:
            found.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(MLP, "forward", counted)
    return found


def data_of(**options: Any) -> FederatedDataModule:
    stream = split(3, classes=6, train=180, test=60)
    sequences = FixedTasks(OWN, outputs="place")
    return tiny_data(stream, sequences=sequences, num_clients=3, schedule={"rounds_per_task": 2}, **options)


def trained(data: FederatedDataModule) -> Federation:
    return fit(tiny_client(data), data)


def test_one_pass_over_each_test_set_gives_every_clients_accuracies(passes: list[int]) -> None:
    data = data_of()
    federation = trained(data)
    assert data.same_tests == [0, 1, 2, 0, 1, 2]
    evaluations = 3  # before training, after each of two tasks
    assert len(passes) == evaluations * DISTINCT
    network = federation.network.eval()
    expected = torch.zeros(3, 2)
    for client, own in enumerate(OWN):
        for position, given in enumerate(own):
            test = data.evaluated[2 * client + position].test
            assert test.labels.unique().tolist() == [0, 1]
            assert test is next(data.evaluated[t].test for t in range(TASKS) if OWN[t // 2][t % 2] == given)
            x = data.evaluated[2 * client + position].transform(test.images)
            scores = network(x)[:, 2 * position : 2 * position + 2]
            expected[client, position] = 100 * (scores.argmax(1) == test.labels).double().mean()
    assert torch.allclose(federation.measured.compute()[:, -1].float(), expected, atol=1e-4)


class NotSearched(list[int]):
    def count(self, value: int) -> int:
        raise AssertionError("a test batch took a pass over all tasks")


def test_a_test_batch_takes_no_pass_over_all_tasks(passes: list[int]) -> None:
    data = data_of()
    data.setup("fit")
    data.__dict__["same_tests"] = NotSearched(data.same_tests)
    trained(data)
    assert len(passes) == 3 * DISTINCT


@pytest.mark.parametrize("options", [{"eval_shuffle": True}, {"evaluate_on": "validation", "validation": 0.2}])
def test_other_orders_or_samples_are_passed_one_by_one(passes: list[int], options: dict[str, Any]) -> None:
    data = data_of(**options)
    trained(data)
    assert data.same_tests == [*range(TASKS)]
    assert len(passes) == 3 * TASKS


def test_tasks_of_other_transforms_are_passed_one_by_one() -> None:
    data = tiny_data(permuted(3))
    data.setup("fit")
    assert len({id(task.test) for task in data.evaluated}) == 1
    assert data.same_tests == [0, 1, 2]
