"""Validation samples are set aside from each client's own samples, and nothing trains on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import at_round, fit, permuted, split, tiny_client, tiny_data, weights

from cfl.data.augmentation import CropFlip
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import RandomShare
from cfl.data.partitions import Dirichlet
from cfl.data.sequences import FixedTasks
from cfl.data.validation import set_aside
from cfl.methods import DER, EWC
from cfl.runtime.errors import ConfigError

SETTINGS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "cumulative": {"exposure": "cumulative"},
    "joint": {"exposure": "joint"},
    "asynchronous": {"exposure": "asynchronous"},
    "sequences": {"sequences": FixedTasks([[2, 0], [1, 2], [0, 1], [2, 1]])},
}


def data_of(validation: float = 0.25, **options: Any) -> FederatedDataModule:
    schedule = {"rounds_per_task": 1, "cohort_width": 3}
    return tiny_data(split(3, classes=6, train=180), validation=validation, schedule=schedule, **options)


def aside_places(data: FederatedDataModule) -> set[int]:
    """The global indices of all clients' validation samples."""
    return {
        int(place)
        for task, clients in enumerate(data.validation_dealt)
        for own in clients.values()
        for place in data.global_index.of(task, own)
    }


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_every_client_keeps_the_rest_of_its_own_samples(share: float) -> None:
    whole, cut = data_of(0.0, partition=Dirichlet(0.5, 3)), data_of(share, partition=Dirichlet(0.5, 3))
    for task in range(3):
        assert set(whole.indices[task]) == set(cut.indices[task]) == set(cut.validation_dealt[task])
        for client, own in whole.indices[task].items():
            train, aside = cut.indices[task][client], cut.validation_indices(task, client)
            assert sorted([*train, *aside]) == sorted(own)
            assert len(aside) == min(max(1, round(share * len(own))), len(own) - 1)
            order = own.tolist()
            assert [order.index(i) for i in train] == sorted(order.index(i) for i in train)
    assert not whole.validation_indices(0, 0).size


def test_the_choice_is_random_and_keyed_by_seed_task_and_client() -> None:
    dealt = [{client: np.arange(100 * client, 100 * client + 40) + 1000 * t for client in range(6)} for t in range(3)]
    _, aside = set_aside(dealt, 0.25, 1)
    _, fewer = set_aside([dealt[0], {2: dealt[1][2], 5: dealt[1][5]}], 0.25, 1)
    assert fewer[1][5].tolist() == aside[1][5].tolist(), "whoever else there is"
    chosen = {tuple(own % 100) for of_task in aside for own in of_task.values()}
    assert len(chosen) == 18, "no two clients or tasks choose alike"
    assert set_aside(dealt, 0.25, 2)[1][0][0].tolist() != aside[0][0].tolist()
    counts = np.bincount(np.concatenate([set_aside(dealt, 0.25, s)[1][0][0] for s in range(400)]), minlength=40)
    assert (np.abs(counts - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all(), "every sample alike"


def test_images_of_several_tasks_are_set_aside_in_all_of_them() -> None:
    """If tasks share images that are dealt once, a validation image of one task is trained on in no other task."""
    data = tiny_data(permuted(3), validation=0.25, repartition=False, partition=Dirichlet(0.5, 3))
    train, aside = ([np.concatenate([*own.values()]) for own in part] for part in (data.dealt, data.validation_dealt))
    for one in range(3):
        assert len(aside[one]) >= 15
        for other in range(3):
            assert not np.intersect1d(aside[one], train[other]).size
    anew = tiny_data(permuted(3), validation=0.25)
    assert len({tuple(of_task[0]) for of_task in anew.validation_dealt}) == 3, "dealt anew, chosen anew"


def test_a_single_sample_is_trained_on() -> None:
    train, aside = set_aside([{0: np.array([7]), 1: np.array([], dtype=np.int64), 2: np.array([3, 4])}], 0.9, 0)
    assert [len(train[0][c]) for c in range(3)] == [1, 0, 1]
    assert [len(aside[0][c]) for c in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_trains_on_it(name: str) -> None:
    data = data_of(**SETTINGS[name])
    held, steps = aside_places(data), 0
    assert len(held) == sum(len(own) for clients in data.validation_dealt for own in clients.values()) > 30
    device = torch.device("cpu")
    for number in range(data.num_rounds):
        at_round(data, number)
        for batch in data.train_dataloader():
            places = batch.index if data.by_global_index else batch.index + int(data.global_index.starts[batch.task])
            assert held.isdisjoint(places[batch.mask].tolist())
            steps += 1
    assert steps > 3
    for task in range(data.num_tasks):
        for client in range(4):
            assert held.isdisjoint(data.client_global_index(task, client).tolist())
            count = sum(len(x) for x, _ in data.client_batches(task, client, 7, device))
            assert count == len(data.client_global_index(task, client))
            assert len(data.validation_indices(task, client)) > 0


def test_buffers_and_extra_rounds_do_without_it() -> None:
    data = data_of()
    federation = fit(tiny_client(data, methods={"der": DER(0.5, 0.0, 3), "ewc": EWC(1.0)}), data)
    held = aside_places(data)
    for client in range(4):
        kept = federation.clients.get("buffer", client)
        assert kept is not None
        places = [place for place in kept["place"].tolist() if place >= 0]
        assert len(places) > 10
        assert held.isdisjoint(places)


@pytest.mark.parametrize("name", ["sequential", "sequences"])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_clients_samples_come_as_its_network_sees_them(name: str, scenario: Any) -> None:
    data = data_of(augmentation=CropFlip(1), scenario=scenario, **SETTINGS[name])
    for position in range(data.num_tasks):
        for client in range(4):
            task = data.stream_task(position, client)
            parts = list(data.validation_batches(position, client, 2, torch.device("cpu")))
            assert max(len(x) for x, _ in parts) == 2
            own = data.validation_dealt[task][client]
            images = data.tasks[task]
            assert torch.equal(torch.cat([x for x, _ in parts]), images.transform(images.train.images[own]))
            assert torch.equal(torch.cat([y for _, y in parts]), images.train.labels[own] + 2 * task)


def test_permuted_images_are_those_of_the_task() -> None:
    data = tiny_data(permuted(2), validation=0.25)
    for task in (1, 0):
        (found, _), *_ = data.validation_batches(task, 2, 100, torch.device("cpu"))
        images = data.tasks[task]
        assert torch.equal(found, images.transform(images.train.images[data.validation_dealt[task][2]]))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation"):
        data_of(share)


# Evaluation on validation samples, for choosing settings.


def evaluated(data: FederatedDataModule, task: int) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [data.evaluation_batch(batch, torch.device("cpu")) for batch in data.val_dataloader()[task]]
    return torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])


@pytest.mark.parametrize("settings", SETTINGS)
def test_evaluation_on_validation_samples_has_all_that_is_set_aside_and_nothing_else(settings: str) -> None:
    data = data_of(evaluate_on="validation", **SETTINGS[settings])
    for number, task in enumerate(data.tasks):
        held_out = sorted({int(i) for own in data.validation_dealt[number].values() for i in own})
        x, y = evaluated(data, number)
        assert torch.equal(x, task.transform(task.train.images[held_out]))
        assert torch.equal(y, task.train.labels[held_out] + data.outputs.offsets[number])
        trained_on = {int(i) for own in data.dealt[number].values() for i in own}
        assert held_out
        assert not trained_on & set(held_out)


def test_what_another_client_trains_on_validates_nobody() -> None:
    """If a sample is dealt to several clients, it validates none when one of them trains on it."""
    data = data_of(evaluate_on="validation")
    data.__dict__["_cut_deal"] = (
        [{0: np.array([1, 2, 3]), 1: np.array([5])} for _ in range(3)],
        [{0: np.array([5, 9]), 1: np.array([9, 4])} for _ in range(3)],
    )
    x, _ = evaluated(data, 1)
    assert torch.equal(x, data.tasks[1].transform(data.tasks[1].train.images[[4, 9]]))
    data = data_of(evaluate_on="validation")
    data.__dict__["_cut_deal"] = ([{0: np.array([1])}] * 3, [{0: np.zeros(0, dtype=np.int64)}] * 3)
    with pytest.raises(ConfigError, match=r"data\.validation = 0\.25.* task 0 "):
        data.val_dataloader()


@pytest.mark.parametrize("outputs", ["task", "place"])
def test_a_task_that_a_client_misses_needs_no_validation_samples(outputs: Any) -> None:
    """Each client is evaluated on validation samples of the tasks that it learns."""
    sequences = FixedTasks([[0, 1], [1, 2], [2, 3], [3, 0]], outputs=outputs)
    options = {"sequences": sequences, "participation": RandomShare(0.75), "schedule": {"rounds_per_task": 1}}
    data = tiny_data(split(4, classes=8, train=160), num_clients=4, validation=0.5, evaluate_on="validation", **options)
    federation = fit(tiny_client(data), data)
    counts = federation.accuracy.counts[:, 1]  # of each client and task, after the last task
    learns = [[client in data.members[task] for task in range(2)] for client in range(4)]
    assert not all(map(all, learns))
    assert (counts > 0).tolist() == learns


def test_a_run_trains_alike_whatever_it_is_evaluated_on() -> None:
    """Evaluating on validation samples trains the same models. Only the evaluated samples differ."""

    def run(**options: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        data = data_of(**options)
        federation = fit(tiny_client(data), data)
        return weights(federation), federation.accuracy.compute()

    on_test, on_validation = run(), run(evaluate_on="validation")
    for name, value in on_test[0].items():
        assert torch.equal(value, on_validation[0][name])
    data = data_of(evaluate_on="validation")
    client = tiny_client(data)
    federation = fit(client, data)
    client.eval()
    x, y = evaluated(data, 2)
    among = data.outputs.test_after(2)
    allowed = torch.ones(6, dtype=torch.bool) if among is None else among[2]
    with torch.no_grad():
        right = client.network(x).masked_fill(~allowed, -torch.inf).argmax(1).eq(y).double().mean()
    assert federation.accuracy.compute()[2, 2] == pytest.approx(100 * float(right))
    assert not torch.equal(on_test[1], on_validation[1])


def test_evaluation_on_validation_samples_needs_some() -> None:
    with pytest.raises(ConfigError, match=r"data\.validation = 0\.0 .*above 0 with data\.evaluate_on: validation"):
        data_of(0.0, evaluate_on="validation")
    with pytest.raises(ConfigError, match=r"data\.evaluate_on = 'train' .*test or validation"):
        data_of(evaluate_on="train")


def test_a_share_of_which_nothing_can_be_set_aside_is_refused() -> None:
    """A validation share is refused if no client has two samples, because a client's only sample is trained on."""
    data = tiny_data(split(3, classes=6, train=18), validation=0.25, num_clients=6, schedule={"clients_per_round": 2})
    with pytest.raises(ConfigError, match=r"data\.validation = 0\.25 .*valid: 0, or fewer clients: none has two"):
        _ = data.dealt
