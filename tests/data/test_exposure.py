"""Cumulative, joint and asynchronous training: clients' samples, with the pixels and outputs of their own tasks."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny import at_round, double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data, weights
from torch import Tensor
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.data.exposure import Exposure, GlobalIndex, Handles, portions
from cfl.data.participation import RandomShare
from cfl.data.partitions import Dirichlet
from cfl.engines import EngineOptions
from cfl.methods import EWC, FOT, FedAGEM, Method
from cfl.runtime.errors import ConfigError


def test_places_are_numbered_through_all_tasks() -> None:
    places = GlobalIndex([3, 2, 4])
    numbers = np.concatenate([places.of(t, np.arange(size)) for t, size in enumerate((3, 2, 4))])
    assert numbers.tolist() == list(range(9))
    tasks, index = places.split(torch.arange(9).view(3, 3))
    assert tasks.flatten().tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert index.flatten().tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 12, 360, 100_000])
def test_handles_stand_for_places_and_do_not_rise_with_them(count: int) -> None:
    handles, places = Handles(count, 0), np.arange(count)
    found = handles.of(places)
    assert sorted(found.tolist()) == places.tolist()
    assert handles.global_index(torch.from_numpy(found)).tolist() == places.tolist()
    if count > 100:
        assert abs(np.corrcoef(found, places)[0, 1]) < 0.2
        assert not np.array_equal(Handles(count, 1).of(places), found)


@pytest.mark.parametrize("start", [0, 7, 11])
def test_indices_have_the_handles_of_their_places(start: int) -> None:
    handles, index = Handles(12, 0), torch.arange(12 - start).view(1, -1)
    of_task = handles.offset_by(start)
    found = of_task.of(index)
    assert torch.equal(found, handles.of(index + start))
    assert torch.equal(of_task.global_index(found), index)
    assert torch.equal(handles.global_index(found), index + start)


@pytest.mark.parametrize(("exposure", "seen"), [("cumulative", [[0], [0, 1], [0, 1, 2]]), ("joint", [[0, 1, 2]] * 3)])
def test_clients_train_on_all_they_hold_of_the_tasks_they_are_exposed_to(
    exposure: Exposure, seen: list[list[int]]
) -> None:
    data = tiny_data(split(3, classes=6), exposure=exposure, participation=RandomShare(0.5), num_clients=6)
    for task, tasks in enumerate(seen):
        trained = data.trained_on(task)
        assert set(trained) == set(data.members[task].tolist())
        assert max(map(len, trained.values())) <= data.most_trained_on
        for client, places in trained.items():
            of, index = data.global_index.split(torch.from_numpy(places))
            for other in range(3):
                held = data.indices[other].get(client, np.array([], dtype=np.int64)) if other in tasks else np.array([])
                assert sorted(index[of == other].tolist()) == sorted(held.tolist())


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_mixed_samples_are_those_of_their_tasks(scenario: str) -> None:
    data = tiny_data(permuted(3) if scenario == "domain" else split(3, classes=6), exposure="joint")
    places = torch.tensor([[0, 75, 81], [170, 200, 3]]) % sum(len(task.train) for task in data.tasks)
    tasks, index = data.global_index.split(places)
    x, y = data.inputs.of_tasks(tasks, index)
    for row in range(2):
        for column in range(3):
            alone = data.gather(int(tasks[row, column]), index[row, column].view(1))
            torch.testing.assert_close(x[row, column], alone[0][0])
            assert y[row, column] == alone[1][0]


@pytest.mark.parametrize(
    "engine", [EngineOptions("vmap"), EngineOptions("workers", workers=2)], ids=["vmap", "workers"]
)
@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_a_joint_run_is_what_the_equations_say(scenario: str, engine: EngineOptions) -> None:
    stream = permuted(2, train=60) if scenario == "domain" else split(2, train=60)
    data = tiny_data(stream, exposure="joint", num_clients=3, schedule={"rounds_per_task": 2, "cohort_width": 2})
    client = tiny_client(data, double(mlp), sgd, None, engine)
    model = {n: t.detach().clone() for n, t in client.network.state_dict().items()}
    federation = fit(client, data)
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        at_round(data, number)
        trained = [local(client.network, model, data, c) for c in plan.clients]
        model = {n: torch.stack([t[n] for t in trained]).mean(0) for n in model}
    torch.testing.assert_close(weights(federation), model, rtol=0, atol=1e-10)


def local(
    network: torch.nn.Module, start: dict[str, Tensor], data: FederatedDataModule, client: int
) -> dict[str, Tensor]:
    model = {n: t.clone().requires_grad_() for n, t in start.items()}
    for batch in data.train_dataloader():
        if client not in batch.clients:
            continue
        row = batch.clients.index(client)
        places = batch.index[row][batch.mask[row]]
        if not len(places):
            continue
        loss = torch.zeros((), dtype=torch.float64)
        for place in places:
            task, index = (part.item() for part in data.global_index.split(place.view(1)))
            x, y = data.gather(int(task), torch.tensor([int(index)]))
            logits = functional_call(network, model, (x,))
            if data.outputs.train is not None:
                logits = logits.masked_fill(~data.outputs.train[int(task)], -torch.inf)
            loss = loss + F.cross_entropy(logits, y) / len(places)
        with torch.no_grad():
            for tensor, gradient in zip(model.values(), torch.autograd.grad(loss, list(model.values())), strict=True):
                tensor -= 0.1 * gradient
    return {n: t.detach() for n, t in model.items()}


def test_cumulative_training_forgets_less_and_joint_knows_all_from_the_start() -> None:
    found = {}
    for exposure in ("sequential", "cumulative", "joint"):
        stream = permuted(3, train=200)
        data = tiny_data(stream, exposure=exposure, schedule={"rounds_per_task": 10})
        found[exposure] = fit(tiny_client(data, partial(mlp, hidden=[32]), sgd), data).accuracy.compute()
    assert found["cumulative"][2, 0] > found["sequential"][2, 0] + 5
    assert found["joint"][0, 2] > found["cumulative"][0, 2] + 20
    assert torch.equal(found["sequential"][0], found["cumulative"][0])


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.exposure"):
        tiny_data(exposure="everything")


# Clients with clocks of their own.


def asynchronous(portion: int | None = None, **options: Any) -> FederatedDataModule:
    """Four clients with unequal shares of three tasks of two classes."""
    stream = split(3, classes=6, train=120)
    partition = Dirichlet(0.5, 3)
    return tiny_data(stream, exposure="asynchronous", portion=portion, partition=partition, **options)


def places_of(data: FederatedDataModule, client: int) -> list[list[int]]:
    """The global indices of a client's samples, a list for each task."""
    return [data.global_index.of(task, data.indices[task][client]).tolist() for task in range(3)]


def test_every_client_goes_through_its_tasks_in_order_at_its_own_pace() -> None:
    data = asynchronous()
    between_two = 0
    for client in range(4):
        own = places_of(data, client)
        periods = [data.trained_on(period)[client].tolist() for period in range(3)]
        assert sorted(chain(*periods)) == sorted(chain(*own))
        assert max(map(len, periods)) - min(map(len, periods)) <= 1
        of = [data.global_index.tasks(torch.tensor(period)).tolist() for period in periods]
        assert [min(tasks) for tasks in of[1:]] >= [max(tasks) for tasks in of[:-1]]
        assert sorted(chain(*of)) == list(chain(*map(sorted, of)))
        between_two += sum(len(set(tasks)) > 1 for tasks in of)
        assert all(period == sorted(period) for period in periods)
    assert between_two > 2


def test_within_a_task_the_order_is_random_and_the_same_every_time() -> None:
    data, again, other = asynchronous(), asynchronous(), asynchronous(seed=1)
    first = [sorted(data.trained_on(0)[client].tolist()) for client in range(4)]
    assert first == [sorted(again.trained_on(0)[client].tolist()) for client in range(4)]
    assert first != [sorted(other.trained_on(0)[client].tolist()) for client in range(4)]
    client = max(range(4), key=lambda c: len(data.indices[0][c]) - len(data.trained_on(0)[c]))
    own, taken = places_of(data, client)[0], data.trained_on(0)[client].tolist()
    assert len(taken) < len(own)
    assert taken != sorted(own)[: len(taken)]


def test_clocks_differ_more_where_all_classes_are_dealt_at_once() -> None:
    """Dealing all classes at once mixes tasks more. A client without samples of a task still trains in every period."""

    def elsewhere(data: FederatedDataModule) -> float:
        """Share of samples of another task than the one whose number is the period's."""
        of = [(p, data.global_index.tasks(torch.tensor(data.trained_on(p)[c]))) for p in range(3) for c in range(4)]
        return sum(int((tasks != p).sum()) for p, tasks in of) / sum(len(tasks) for _, tasks in of)

    apart, at_once = [], []
    for seed in range(4):
        apart.append(elsewhere(asynchronous(seed=seed)))
        at_once.append(elsewhere(asynchronous(seed=seed, repartition=False)))
    assert sum(at_once) > sum(apart)
    stream, lacking = split(3, classes=6, train=120), Dirichlet(0.1, 10)
    data = tiny_data(stream, exposure="asynchronous", partition=lacking, repartition=False)
    assert min(len(data.indices[task][client]) for task in range(3) for client in range(4)) == 0
    assert min(len(data.trained_on(period)[client]) for period in range(3) for client in range(4)) > 0
    assert fit(tiny_client(data, mlp), data).finished
    with pytest.raises(ConfigError, match=r"client \d has no sample of task"):
        tiny_data(split(3, classes=6, train=120), partition=lacking, repartition=False).setup("fit")


def test_a_portion_of_fixed_size_is_the_same_for_all() -> None:
    data = asynchronous(4)
    assert all(len(data.trained_on(period)[client]) == 4 for period in range(3) for client in range(4))
    with pytest.raises(ConfigError, match=r"data\.portion = 60 .* at most"):
        asynchronous(60).setup("fit")


def test_clients_at_different_tasks_train_each_on_its_own_outputs() -> None:
    data = asynchronous(schedule={"rounds_per_task": 2, "cohort_width": 2})
    client = tiny_client(data, double(mlp), sgd)
    model = {n: t.detach().clone() for n, t in client.network.state_dict().items()}
    federation = fit(client, data)
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        at_round(data, number)
        trained = [local(client.network, model, data, c) for c in plan.clients]
        model = {n: torch.stack([t[n] for t in trained]).mean(0) for n in model}
    torch.testing.assert_close(weights(federation), model, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", [EWC(), FOT()], ids=lambda m: type(m).__name__)
def test_methods_that_need_boundaries_are_refused(method: Method) -> None:
    data = asynchronous()
    with pytest.raises(ConfigError, match=r"data\.exposure.*methods\.some"):
        fit(tiny_client(data, mlp, sgd, {"some": method}), data)


def test_others_are_never_told_of_one() -> None:
    def told(plan: Any) -> None:
        raise AssertionError("told that a task begins or ends")

    for exposure in ("asynchronous", "sequential"):
        data = tiny_data(split(3, classes=6, train=120), exposure=exposure)
        method = FedAGEM(8)
        method.begin_task = method.end_task = told  # type: ignore[method-assign]
        fit(tiny_client(data, mlp, sgd, {"told": method}), data)
        assert method.reference


@pytest.mark.parametrize("class_loss", ["seen", "own"])
def test_classes_in_the_loss_would_tell_where_tasks_end(class_loss: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"data\.class_loss = '{class_loss}' .* all with data.exposure: asynchronous"
    ):
        asynchronous(scenario="class", class_loss=class_loss)


def test_tasks_that_nobody_gets_to_are_named() -> None:
    """A portion of 1 gives each client three samples of its first task only. A warning names the tasks left out."""
    data = asynchronous(1)
    with pytest.warns(UserWarning, match=r"on tasks 1, 2 \(from 0\): 3 portions of data\.portion = 1 end before"):
        data.setup("fit")
    trained = {place for period in range(3) for own in data.trained_on(period).values() for place in own.tolist()}
    assert len(trained) == 12
    assert all(trained.isdisjoint(places) for c in range(4) for places in places_of(data, c)[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asynchronous().setup("fit")
        tiny_data().setup("fit")


def test_portions_of_whoever_has_too_few_samples() -> None:
    with pytest.raises(ConfigError, match=r"data\.partition = '1 samples of client 0 over 2 portions'"):
        portions([{0: np.arange(1)}, {0: np.zeros(0, dtype=np.int64)}], 0, None)


def test_the_client_with_the_fewest_samples_says_what_portions_there_can_be() -> None:
    held = [{0: np.arange(9), 1: np.arange(5), 2: np.arange(7)}] * 2
    with pytest.raises(ConfigError, match=r"data\.portion = 8 .*at most 5: client 1 has 10 samples in all"):
        portions(held, 0, 8)
    assert [len(own[1]) for own in portions(held, 0, 5)] == [5, 5]
    with pytest.raises(ConfigError, match=r"data\.partition = '1 samples of client 1 over 2 portions'"):
        portions([{0: np.arange(4), 1: np.arange(1)}, {0: np.arange(4), 1: np.arange(0)}], 0, 8)


@pytest.mark.parametrize("options", [{"portion": 5}, {"portion": 0, "exposure": "asynchronous"}])
def test_bad_portions_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.portion"):
        tiny_data(**options)


def test_every_client_must_hold_every_task() -> None:
    data = tiny_data(permuted(3), exposure="asynchronous", participation=RandomShare(0.5), num_clients=6)
    with pytest.raises(ConfigError, match="every client holds every task"):
        data.setup("fit")
