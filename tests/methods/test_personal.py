"""Personal layers: what stays on a client, from no communication at all to a shared body with personal heads."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support.naive import accuracy, federated_averaging, plain_network, train_client
from support.tiny import (
    Poison,
    Rounds,
    double,
    fit,
    five_unequal,
    kept_by,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining, RandomShare
from cfl.federation import matrix_rows
from cfl.methods.composition import Composition
from cfl.methods.personal import PersonalLayers
from cfl.runtime.errors import BadUpdate, ConfigError
from cfl.training.client import Client

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.05)
HEAD = 4 * 8 + 4


def data_of(stream: Any = None, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round side by side, two tasks of three rounds."""
    return five_unequal(stream, **options)


def personal_client(data: FederatedDataModule, layers: list[str], network: Any = mlp, optimizer: Any = sgd) -> Client:
    return tiny_client(data, network, optimizer, {"personal": PersonalLayers(layers)})


class Kept(Callback):
    """Records the tensors that clients keep, after every round."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, dict[str, Tensor]]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:
        assert pl_module.federation is not None
        self.rounds.append(kept_by(pl_module.federation))


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(torch.optim.Adam, lr=0.02)], ids=["sgd", "adam"])
def test_all_layers_personal_is_every_client_on_its_own(optimizer: Any) -> None:
    data = data_of()
    client = personal_client(data, ["*"], double(mlp), optimizer)
    initial = copy.deepcopy(client.network.state_dict())
    alone = {c: plain_network(data, double(mlp), initial) for c in range(5)}
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for c in plan.clients:
            train_client(alone[c], data, plan, c, optimizer)

    federation = fit(client, data)
    assert federation.channel.total_uplink_bytes == 0
    assert federation.channel.total_downlink_bytes == 0
    for name, value in weights(federation).items():
        assert torch.equal(value, initial[name]), "there is no global model to move"
    sampled = {c for r in range(6) for c in data.rounds.round(r).clients}
    for c in range(5):
        kept = federation.clients.get("model", c)
        assert (kept is not None) == (c in sampled)
        for name, value in (kept or {}).items():
            torch.testing.assert_close(value, alone[c].state_dict()[name], rtol=0, atol=1e-10)
            assert not torch.equal(value, initial[name])


def test_clients_that_have_not_trained_are_tested_by_one_pass() -> None:
    """Of a large federation most clients have not trained yet, so that their models are equal."""
    data = tiny_data(
        permuted(2, train=120, test=40), num_clients=40, schedule={"rounds_per_task": 1, "clients_per_round": 3}
    )
    client = personal_client(data, ["*"])
    passes, of_evaluations = 0, []

    def count(module: Any, inputs: Any) -> None:
        nonlocal passes
        passes += not module.training

    class Evaluations(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Client) -> None:
            nonlocal passes
            of_evaluations.append(passes)
            passes = 0

    client.network.register_forward_pre_hook(count)
    federation = fit(client, data, callbacks=[Evaluations()])
    rounds = [set(data.rounds.round(number).clients) for number in range(2)]
    assert of_evaluations[0] == 2, "before training, one pass over each of two test sets"
    for passed, trained in zip(of_evaluations[1:], [rounds[0], rounds[0] | rounds[1]], strict=True):
        assert 2 * (len(trained) + 1) <= passed <= 2 * (2 * len(trained) + 1)
    for c in range(40):
        own = {**federation.server.parameters, **(federation.clients.get("model", c) or {})}
        for t, task in enumerate(data.tasks):
            logits = functional_call(client.network, own, (task.transform(task.test.images),))
            right = 100 * float((logits.argmax(1) == task.test.labels).double().mean())
            assert federation.accuracy.compute()[c, -1, t].item() == pytest.approx(right)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(("layers", "prefix"), [(["head.*"], "head."), (["layers.0.weight"], "layers.0.weight")])
def test_the_other_layers_are_averaged(layers: list[str], prefix: str, weighting: str) -> None:
    data = data_of()
    client = personal_client(data, layers, double(mlp), MOMENTUM)
    network = plain_network(data, double(mlp), client.network.state_dict())
    expected, kept = federated_averaging(
        network,
        data,
        MOMENTUM,
        by_samples=weighting == "samples",
        stays_local=lambda name: name.startswith(prefix),
    )
    federation = fit(client, data, {"client_weighting": weighting})
    found = weights(federation)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for c, tensors in kept.items():
        own = federation.clients.get("model", c)
        assert own is not None
        torch.testing.assert_close(own, tensors, rtol=0, atol=1e-10)


def test_only_what_is_shared_is_sent() -> None:
    data = data_of()
    federation = fit(personal_client(data, ["head.*"]), data)
    shared = 4 * (16 * 8 + 8)
    assert federation.channel.uplink_bytes == {"update": 6 * 3 * shared}
    assert federation.channel.downlink_bytes == {"model": 6 * 3 * shared}
    assert federation.clients.bytes() == 4 * HEAD * len(federation.clients.holders("model"))


def test_clients_that_are_not_sampled_keep_what_they_have() -> None:
    data, record = data_of(schedule={"clients_per_round": 1, "rounds_per_task": 6}), Kept()
    fit(personal_client(data, ["head.*"]), data, callbacks=[record])
    before: dict[int, dict[str, Tensor]] = {}
    resting = 0
    for number, after in enumerate(record.rounds):
        (trained,) = data.rounds.round(number).clients
        assert set(after) == {*before, trained}
        for c, tensors in before.items():
            same = [torch.equal(after[c][name], value) for name, value in tensors.items()]
            assert not any(same) if c == trained else all(same)
            resting += c != trained
        before = after
    assert resting > 10


@pytest.mark.parametrize("scenario", ["domain", "task", "class"])
@pytest.mark.parametrize("layers", [["*"], ["head.*"]], ids=str)
def test_every_client_is_evaluated_with_its_own_model_on_the_tasks_it_holds(layers: list[str], scenario: Any) -> None:
    stream = permuted() if scenario == "domain" else split()
    data = data_of(
        stream,
        scenario=scenario,
        participation=Joining(3, 2),
        schedule={"clients_per_round": 2, "rounds_per_task": 2},
        eval_batch_size=7,
    )
    client, kept, shared = personal_client(data, layers), Kept(), Rounds()
    initial = {name: tensor.detach().clone() for name, tensor in client.network.state_dict().items()}
    federation = fit(client, data, callbacks=[kept, shared])
    network = plain_network(data, mlp, initial).eval()
    matrix = federation.accuracy.compute()
    assert matrix.shape == (5, 2, 2)
    states = [(initial, {})] + [(shared.models[r], kept.rounds[r]) for r in (1, 3)]
    for row, (common, by_client) in enumerate(states):
        for c in range(5):
            own = by_client.get(c) or {n: initial[n] for n in federation.model.personal}
            for i, task in enumerate(data.tasks):
                found = federation.accuracy.initial()[c, i] if row == 0 else matrix[c, row - 1, i]
                if c not in data.members[i]:
                    assert math.isnan(found)
                    continue
                with torch.no_grad():
                    logits = functional_call(network, {**common, **own}, (task.transform(task.test.images),))
                first = 2 * i if scenario != "domain" else 0
                expected = accuracy(logits, task.test.labels + first)
                known = accuracy(logits[:, first : first + task.num_classes], task.test.labels)
                assert found == pytest.approx(known if scenario == "task" else expected)
                if scenario == "class" and row:
                    assert federation.known is not None
                    assert federation.known.compute()[c, row - 1, i] == pytest.approx(known)
    assert matrix[:, 1, 1].std() > 0, "clients differ"
    summary = federation.accuracy.summary()
    means = [sum(float(matrix[c, 1, i]) for i in held) / len(held) for c in range(5) if (held := held_by(data, c))]
    assert summary["acc"] == pytest.approx(sum(means) / 5), "who holds fewer tasks is judged by these"
    assert summary["clients_evaluated"] == 5


def test_figures_are_of_whoever_holds_a_task() -> None:
    """Clients have figures only for tasks that they hold, and no rows from before they join."""
    data = data_of(participation=RandomShare(0.4), schedule={"clients_per_round": 1.0})
    federation = fit(personal_client(data, ["head.*"]), data)
    matrix = federation.accuracy.compute()
    assert any(matrix[c, 1].isnan().all() for c in range(data.num_clients))
    assert matrix_rows.last_complete(federation) == data.num_tasks - 1
    assert matrix_rows.figures(federation, federation.accuracy) == federation.accuracy.summary()
    known = matrix[~matrix[:, -1].isnan().all(-1)]
    assert matrix_rows.means(federation)[-1] == pytest.approx(known[:, -1].nanmean(-1).mean().item())


def held_by(data: FederatedDataModule, client: int) -> list[int]:
    return [task for task, members in enumerate(data.members) if client in members]


@pytest.mark.parametrize("layers", [["*"], ["head.*"]], ids=["all", "heads"])
def test_what_a_client_keeps_is_checked_for_nan(layers: list[str]) -> None:
    """Kept tensors do not go through the Channel's sums, but NaN in them must also stop the run."""
    data, wild = data_of(), partial(torch.optim.SGD, lr=1e20)
    with pytest.raises(BadUpdate, match=r"client \d trained to NaN or infinity in round 0 \(task 0\)"):
        fit(personal_client(data, layers, optimizer=wild), data)


def test_a_skipped_client_keeps_what_it_had() -> None:
    data, record = data_of(), Kept()
    client = personal_client(data, ["head.*"])
    poison = Poison(data.rounds.round(0).clients[1], 0)
    client.methods = Composition({**client.methods, "poison": poison})
    federation = fit(client, data, {"on_bad_update": "skip"}, callbacks=[record])
    assert poison.client not in record.rounds[0]
    assert set(data.rounds.round(0).clients) - {poison.client} == set(record.rounds[0])
    assert federation.channel.skipped == [(0, 0, poison.client)]
    assert all(bool(torch.isfinite(value).all()) for value in weights(federation).values())


def test_a_client_skipped_for_what_it_sends_keeps_what_it_had() -> None:
    data, record = data_of(), Kept()
    client = personal_client(data, ["head.*"])
    poison = Poison(data.rounds.round(0).clients[1], 0, "layers.0.weight")
    client.methods = Composition({**client.methods, "poison": poison})
    federation = fit(client, data, {"on_bad_update": "skip"}, callbacks=[record])
    assert poison.client not in record.rounds[0]
    assert federation.channel.skipped == [(0, 0, poison.client)]


def test_running_statistics_alone_belong_to_the_batchnorm_option() -> None:
    data = data_of()
    with pytest.raises(ConfigError, match=r"federated\.batchnorm=local"):
        fit(personal_client(data, ["*.running_*"], norm_net), data)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    data = data_of()
    with pytest.raises(ConfigError, match=r"layers = 'heads\.\*'.*head\.weight"):
        fit(personal_client(data, ["head.*", "heads.*"]), data)


def test_personal_heads_of_other_tasks_do_not_move() -> None:
    """As for a shared head, weight decay must not shrink a client's outputs of earlier tasks."""
    data, record = data_of(split(), scenario="task"), Kept()
    client = personal_client(data, ["head.*"], mlp, MOMENTUM)
    initial = {n: t.detach().clone() for n, t in client.network.state_dict().items() if n.startswith("head.")}
    fit(client, data, callbacks=[record])
    for c, tensors in record.rounds[5].items():
        before = record.rounds[2].get(c, initial)
        for name, value in tensors.items():
            assert torch.equal(value[:2], before[name][:2])
            first = record.rounds[2].get(c)
            assert first is None or torch.equal(first[name][2:], initial[name][2:])


@pytest.mark.parametrize("option", [{"server_lr": 0.5}, {"server_momentum": 0.9}, {"client_weighting": "samples"}])
def test_options_of_a_step_that_nobody_takes_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no tensor of the model is averaged") as caught:
        fit(personal_client(data_of(), ["*"]), data_of(), option)
    assert caught.value.key == f"federated.{next(iter(option))}"
