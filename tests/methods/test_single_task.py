"""Single-task training: every task from the initial model, with one model or one per client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.naive import accuracy, plain_network, train_client
from support.naive_decomposed import data_of
from support.tiny import (
    NetworkFactory,
    double,
    fit,
    mlp,
    norm_net,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)

from cfl.data.sources import Source, Synthetic
from cfl.data.streams import Sequence
from cfl.engines.cohort import Cohort
from cfl.methods import (
    AGEM,
    ER,
    EWC,
    SCAFFOLD,
    AnalyticHead,
    DPFedAvg,
    FedCurv,
    FedProx,
    Method,
    PersonalLayers,
    SingleTask,
)
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import difference

ADAM = partial(torch.optim.Adam, lr=0.02)


@pytest.mark.parametrize(
    ("make", "stream"), [(norm_net, None), (mlp, split(3, classes=6))], ids=["domain, BatchNorm", "task"]
)
def test_each_client_has_a_model_for_each_task(make: NetworkFactory, stream: Any) -> None:
    """Against clients trained one by one; a task that a client has missed is answered with its latest model."""
    data = data_of(stream)
    methods: dict[str, Method] = {"own": PersonalLayers(), "single": SingleTask()}
    client = tiny_client(data, double(make), ADAM, methods)
    initial = copy.deepcopy(client.network.state_dict())
    models: dict[int, dict[int, torch.nn.Module]] = {c: {} for c in range(3)}
    untrained = plain_network(data, double(make), initial).eval()
    expected = torch.full((3, 3, 3), torch.nan)
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for c in plan.clients:
            model = models[c].setdefault(plan.task, plain_network(data, double(make), initial))
            start = copy.deepcopy(model.state_dict())
            train_client(model, data, plan, c, ADAM)
            if data.scenario == "task":
                used = slice(2 * plan.task, 2 * plan.task + 2)
                for name in ("head.weight", "head.bias"):
                    kept = model.state_dict()[name].clone()
                    model.state_dict()[name].copy_(start[name])
                    model.state_dict()[name][used] = kept[used]
        if not plan.last_of_task:
            continue
        for c, own in models.items():
            for i, task in enumerate(data.tasks):
                answers = own.get(i, own[max(own)] if own else untrained).eval()
                with torch.no_grad():
                    logits = answers(task.transform(task.test.images))
                if data.scenario == "task":
                    logits = logits[:, 2 * i : 2 * i + 2]
                expected[c, plan.task, i] = accuracy(logits, task.test.labels)
                answers.train()

    federation = fit(client, data)
    torch.testing.assert_close(federation.accuracy.compute().float(), expected, rtol=0, atol=1e-3)
    assert federation.channel.total_uplink_bytes == 0
    trained = sum(len(own) for own in models.values())
    size = sum(p.numel() * 8 for p in client.network.parameters())
    assert methods["single"].report().figures["model_bytes"] == size * trained
    assert methods["single"].client_storage() > 0
    for c, own in models.items():
        assert federation.clients.get("model", c) is not None or not own


def test_its_learned_tasks_are_never_forgotten() -> None:
    data = data_of(clients_per_round=1.0)
    methods: dict[str, Method] = {"single": SingleTask(), "own": PersonalLayers()}
    federation = fit(tiny_client(data, mlp, ADAM, methods), data)
    matrix = federation.accuracy.compute()
    for task in range(3):
        assert torch.equal(matrix[:, 2, task], matrix[:, task, task])
    assert federation.accuracy.summary()["fgt"] == 0
    assert federation.accuracy.summary()["acc"] == pytest.approx(methods["single"].report().figures["acc_single_task"])


@pytest.mark.parametrize("beside", [AnalyticHead, EWC, ER, AGEM, SCAFFOLD, FedCurv])
def test_nothing_of_an_earlier_task_may_be_used(beside: Callable[[], Method]) -> None:
    """Each task is trained as if it were the only one."""
    with pytest.raises(ConfigError, match=r"methods = \['beside'\].*beside SingleTask"):
        fit(tiny_client(data := data_of(), mlp, sgd, {"single": SingleTask(), "beside": beside()}), data)


@pytest.mark.parametrize("beside", [partial(FedProx, mu=1.0), partial(DPFedAvg, clip=0.2)])
def test_the_model_does_not_depend_on_the_first_tasks_samples(beside: Callable[[], Method]) -> None:
    """Nor on their noise, which is drawn anew in each round."""

    def last(noise: float) -> dict[str, torch.Tensor]:
        tasks: list[Source] = [Synthetic(4, [1, 4, 4], 40, 20, noise=level) for level in (noise, 30.0)]
        data = tiny_data(Sequence(tasks), scenario="domain", schedule={"rounds_per_task": 2})
        return weights(fit(tiny_client(data, mlp, sgd, {"single": SingleTask(), "beside": beside()}), data))

    assert difference(last(20.0), last(90.0)) is None


def test_one_model_starts_anew_and_clients_statistics_go_on() -> None:
    """Without personal models no model is filed. Statistics that ``batchnorm: local`` keeps are not reset."""
    starts: list[tuple[int, dict[str, torch.Tensor]]] = []

    class Starts(Method):
        def start_clients(self, cohort: Cohort) -> None:
            if cohort.round % 2 == 0:
                tensors = {**cohort.parameters, **cohort.buffers}
                starts.append((cohort.task, {n: t[0].detach().clone() for n, t in tensors.items()}))

    data = data_of(clients_per_round=1.0, cohort_width=3)
    client = tiny_client(data, norm_net, sgd, {"single": SingleTask(), "starts": Starts()})
    initial = copy.deepcopy(client.network.state_dict())
    federation = fit(client, data, {"batchnorm": "local"})
    assert {task for task, _ in starts} == {0, 1, 2}
    for task, start in starts:
        for name, value in start.items():
            same = torch.equal(value, initial[name])
            assert same == (task == 0 or ("running" not in name and "num_batches" not in name)), (task, name)
    assert set(federation.clients.state_dict()) == {"model"}
    assert set(client.methods["single"].report().figures) == {"acc_single_task"}


def test_momentum_of_the_server_is_no_part_of_the_next_task() -> None:
    """Momentum starts anew with each task, so it changes nothing if tasks have one round."""
    models = []
    for momentum in (0.0, 0.9):
        data = data_of(rounds_per_task=1, clients_per_round=1.0)
        client = tiny_client(data, mlp, sgd, {"single": SingleTask()})
        models.append(weights(fit(client, data, {"server_momentum": momentum})))
    assert all(torch.equal(models[1][name], value) for name, value in models[0].items())


def test_outputs_that_are_not_in_the_loss_are_initial_in_every_tasks_model() -> None:
    """A client's model of a task is as if this task were the only one, also in outputs of other tasks."""
    schedule = {"clients_per_round": 5}
    data = tiny_data(split(3, classes=6), scenario="class", class_loss="own", num_clients=5, schedule=schedule)
    client = tiny_client(data, mlp, sgd, {"own": PersonalLayers(), "single": SingleTask()})
    initial = {name: value.clone() for name, value in client.network.state_dict().items()}
    federation = fit(client, data)
    for owner in range(5):
        for task in range(3):
            others = torch.ones(6, dtype=torch.bool)
            others[2 * task : 2 * task + 2] = False
            for name in ("head.weight", "head.bias"):
                found = federation.model_of(owner, task)[name]
                assert torch.equal(found[others], initial[name][others])
                assert not torch.equal(found[~others], initial[name][~others])
