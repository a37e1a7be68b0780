"""Task-, class- and domain-incremental learning over one output layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.naive import accuracy, plain_network
from support.tiny import Rounds, fit, mlp, permuted, split, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.scenarios import output_map
from cfl.data.sequences import RandomTasks
from cfl.runtime.errors import ConfigError


def rows(mask: Tensor | None) -> list[list[int]] | None:
    """Output numbers per task."""
    return None if mask is None else [row.nonzero().flatten().tolist() for row in mask]


OWN = [[0, 1], [2, 3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("scenario", "class_loss", "num_outputs", "offsets", "own", "train", "test"),
    [
        ("task", "all", 7, (0, 2, 5), OWN, OWN, OWN),
        ("class", "all", 7, (0, 2, 5), OWN, None, None),
        ("class", "seen", 7, (0, 2, 5), OWN, [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]], "seen"),
        ("class", "own", 7, (0, 2, 5), OWN, OWN, None),
        ("domain", "all", 3, (0, 0, 0), [[0, 1], [0, 1, 2], [0, 1]], [[0, 1], [0, 1, 2], [0, 1]], "own"),
    ],
)
def test_outputs_of_tasks_with_2_3_and_2_classes(
    scenario: Any, class_loss: Any, num_outputs: int, offsets: tuple[int, ...], own: Any, train: Any, test: Any
) -> None:
    found = output_map([2, 3, 2], scenario, class_loss)
    assert found.num_outputs == num_outputs
    assert found.offsets == offsets
    assert rows(found.own) == own
    assert rows(found.train) == train
    for task in range(3):
        expected = {"own": own, "seen": [found.train is not None and rows(found.train)[task]] * 3}.get(str(test), test)
        assert rows(found.test_after(task)) == expected
    # Before any training no class has been seen, so all classes compete.
    assert rows(found.test_after(-1)) == {"own": own, "seen": None}.get(str(test), test)


def test_samples_of_earlier_tasks_compete_with_all_classes_seen_by_now() -> None:
    """With the loss over seen classes, samples of earlier tasks compete with all classes seen so far.

    In other settings the outputs of their own task remain.
    """
    everything = list(range(7))
    seen = output_map([2, 3, 2], "class", "seen")
    assert [rows(seen.in_loss_during(task)) for task in range(3)] == [
        rows(seen.train),
        [everything[:5], everything[:5], everything],
        [everything] * 3,
    ]
    for found in (output_map([2, 3], "task"), output_map([2, 3], "domain"), output_map([2, 3], "class", "own")):
        assert rows(found.in_loss_during(1)) == rows(found.train)
    assert output_map([2, 3], "class", "all").in_loss_during(1) is None


def test_trained_on_together_all_classes_are_seen_from_the_first_round_on() -> None:
    data = tiny_data(split(2), scenario="class", class_loss="seen", exposure="joint")
    assert data.outputs.train is None


def test_what_is_seen_must_follow_from_the_streams_order() -> None:
    with pytest.raises(ConfigError, match=r"data\.class_loss"):
        tiny_data(split(4, classes=8), scenario="class", class_loss="seen", sequences=RandomTasks(2))


def test_no_mask_where_every_task_has_all_outputs() -> None:
    for found in (output_map([4, 4], "domain"), output_map([4], "task")):
        assert found.train is None
        assert found.test_after(1) is None


OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("scenario", "class_loss"), [("task", "all"), ("class", "seen")])
def test_outputs_outside_the_loss_do_not_move(scenario: Any, class_loss: str, width: int, optimizer: Any) -> None:
    """Neither weight decay nor momentum changes outputs outside the loss, bit for bit."""
    data = tiny_data(
        split(),
        scenario=scenario,
        class_loss=class_loss,
        partition=Dirichlet(1.0, 3),
        schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": width},
    )
    client, record = tiny_client(data, optimizer=optimizer), Rounds()
    before = {name: tensor.detach().clone() for name, tensor in client.network.state_dict().items()}
    fit(client, data, callbacks=[record])
    for number, after in enumerate(record.models):
        others = slice(2, 4) if number < 2 else slice(0, 2)
        for name in ("head.weight", "head.bias"):
            if number < 2 or scenario == "task":
                assert torch.equal(after[name][others], before[name][others])
            own = slice(0, 2) if number < 2 else slice(2, 4)
            assert not (after[name][own] == before[name][own]).any()
        before = after


def test_all_outputs_move_when_all_classes_are_in_the_loss() -> None:
    data = tiny_data(split(), scenario="class", schedule={"rounds_per_task": 1})
    client, record = tiny_client(data), Rounds()
    before = client.network.head.bias.detach().clone()
    fit(client, data, callbacks=[record])
    assert not (record.models[0]["head.bias"] == before).any()


def logits_of_tests(data: FederatedDataModule, network: nn.Module, state: dict[str, Tensor]) -> list[Tensor]:
    network.load_state_dict(state)
    network.eval()
    with torch.no_grad():
        return [network(task.transform(task.test.images)) for task in data.tasks]


@pytest.mark.parametrize(
    ("scenario", "class_loss"), [("task", "all"), ("class", "all"), ("class", "seen"), ("domain", "all")]
)
def test_accuracy_matrices_against_a_naive_evaluation(scenario: Any, class_loss: str) -> None:
    """Matrices score the global model after each task's last round.

    A class-incremental run also has the matrix of task-incremental learning. With ``class_loss: seen``, predictions are
    among the classes seen so far.
    """
    data = tiny_data(
        permuted() if scenario == "domain" else split(3, classes=6, train=90, test=60),
        scenario=scenario,
        class_loss=class_loss,
        schedule={"rounds_per_task": 3, "local_epochs": 2},
        eval_batch_size=7,
    )
    client, record = tiny_client(data), Rounds()
    models = [{name: tensor.detach().clone() for name, tensor in client.network.state_dict().items()}]
    network = plain_network(data, mlp, models[0])
    federation = fit(client, data, callbacks=[record])
    models += record.models[2::3]

    for row, state in enumerate(models):
        logits = logits_of_tests(data, network, state)
        for i, task in enumerate(data.tasks):
            labels = task.test.labels
            first = 0 if scenario == "domain" else 2 * i
            own = accuracy(logits[i][:, first : first + task.num_classes], labels)
            competing = logits[i].clone()
            if class_loss == "seen" and row > 0:  # 2 classes per task
                competing[:, 2 * row :] = -torch.inf
            open_to_all = accuracy(competing, labels + first)
            score = open_to_all if scenario == "class" else own
            known = federation.known
            if row == 0:
                assert federation.accuracy.initial()[i] == pytest.approx(score)
            else:
                assert federation.accuracy.compute()[row - 1, i] == pytest.approx(score)
            if scenario == "class":
                assert known is not None
                found = known.initial()[i] if row == 0 else known.compute()[row - 1, i]
                assert found == pytest.approx(own)
    if scenario == "class":
        assert federation.known is not None
        gain = federation.known.compute() - federation.accuracy.compute()
        assert bool((gain >= 0).all())
        assert bool((gain > 0).any())
    else:
        assert federation.known is None


def test_with_one_task_the_scenarios_are_the_same() -> None:
    found = []
    for scenario in ("task", "class", "domain"):
        data = tiny_data(split(1), scenario=scenario)
        found.append(weights(fit(tiny_client(data), data)))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_server_momentum_leaves_other_tasks_outputs_alone(momentum: float) -> None:
    """The momentum of the first task's outputs does not move them during the second task."""
    data = tiny_data(split(), scenario="task")
    record = Rounds()
    fit(tiny_client(data), data, {"server_momentum": momentum}, callbacks=[record])
    first, last = record.models[2], record.models[5]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(first[name][:2], last[name][:2])
        assert not torch.equal(first[name][2:], last[name][2:])
