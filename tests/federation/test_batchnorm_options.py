"""``federated.batchnorm``: running statistics are averaged, kept by each client, or dropped."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support.naive import accuracy, federated_averaging, plain_network, statistics
from support.tiny import double, fit, norm_net, permuted, sgd, tiny_client, tiny_data, weights
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.engines.cohort import Cohort
from cfl.export.answer import Choice, answer_of
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.methods.personal import PersonalLayers
from cfl.models import Network
from cfl.training.client import Client

OPTIONS = ["average", "local", "drop"]


def data_of(**options: Any) -> FederatedDataModule:
    """Five clients of twelve samples, three per round; batches of seven and five."""
    schedule = {"batch_size": 7, "clients_per_round": 3, "cohort_width": 2}
    return tiny_data(permuted(train=60), num_clients=5, schedule=schedule, **options)


class Statistics(Method):
    """Records the running statistics with which each client begins and ends a round."""

    def __init__(self) -> None:
        self.begun: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.ended: dict[tuple[int, int], dict[str, Tensor]] = {}

    def start_clients(self, cohort: Cohort) -> None:
        for p, client in enumerate(cohort.clients):
            self.begun[cohort.round, client] = {n: b[p].clone() for n, b in cohort.buffers.items()}

    def finish_clients(self, cohort: Cohort, positions: Any) -> None:
        for p in positions:
            self.ended[cohort.round, cohort.clients[p]] = {n: b[p].clone() for n, b in cohort.buffers.items()}


class GlobalModels(Callback):
    """Keeps the global model of every round, before and after its evaluation."""

    def __init__(self) -> None:
        self.before: list[dict[str, Tensor]] = []
        self.after: list[dict[str, Tensor]] = []
        self.modes: list[list[bool]] = []

    def on_validation_start(self, trainer: Trainer, pl_module: Client) -> None:
        self.before.append(copy.deepcopy(pl_module.network.state_dict()))

    def on_validation_end(self, trainer: Trainer, pl_module: Client) -> None:
        self.after.append(copy.deepcopy(pl_module.network.state_dict()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Client, *_: Any) -> None:
        self.modes.append([module.training for module in pl_module.network.modules()])


def run(option: str, **options: Any) -> tuple[Federation, Statistics, GlobalModels]:
    probe, models, data = Statistics(), GlobalModels(), data_of(**options)
    client = tiny_client(data, norm_net, methods={"probe": probe})
    return fit(client, data, {"batchnorm": option}, callbacks=[models]), probe, models


def initial_statistics() -> dict[str, Tensor]:
    return dict(tiny_client(data_of(), norm_net).network.named_buffers())


@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_sent(option: str) -> None:
    """Messages hold the weights in float32. Averaged statistics add 2 x (2 + 5) float32 and two int64 counters."""
    federation, _, _ = run(option)
    conv, norms, linear, head = 2 * 9 + 2, 2 * (2 + 5), 5 * 8 + 5, 4 * 5 + 4
    message = 4 * (conv + norms + linear + head) + (4 * 2 * (2 + 5) + 8 * 2 if option == "average" else 0)
    clients = 3 * federation.schedule.num_rounds
    assert federation.channel.uplink_bytes == {"update": clients * message}
    assert federation.channel.downlink_bytes == {"model": clients * message}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_clients_begin_with(option: str) -> None:
    federation, probe, _ = run(option)
    initial = initial_statistics()
    returning = 0
    for (round, client), begun in probe.begun.items():
        earlier = [r for r, c in probe.ended if c == client and r < round]
        if option == "local" and earlier:
            expected = probe.ended[max(earlier), client]
            returning += 1
        elif option == "average" and round > 0:
            before = [probe.ended[round - 1, c] for c in federation.schedule.round(round - 1).clients]
            expected = {n: torch.stack([b[n].double() for b in before]).mean(0) for n in initial}
        else:
            expected = initial
        for name, value in begun.items():
            torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-6, atol=1e-6)
        assert all(not torch.equal(probe.ended[round, client][n], value) for n, value in begun.items()), "trained"
    assert returning or option != "local"


@pytest.mark.parametrize("option", OPTIONS)
def test_what_server_and_clients_keep(option: str) -> None:
    federation, probe, _ = run(option)
    initial, final = initial_statistics(), dict(federation.network.named_buffers())
    sampled = {client for _, client in probe.ended}
    assert all(torch.equal(final[name], initial[name]) == (option != "average") for name in initial)
    if option != "local":
        assert federation.clients.bytes() == 0
        return
    for client in range(5):
        kept = federation.clients.get("model", client)
        if client not in sampled:
            assert kept is None
            continue
        last = probe.ended[max(r for r, c in probe.ended if c == client), client]
        assert kept is not None
        assert set(kept) == set(initial)
        assert all(torch.equal(kept[name], value) for name, value in last.items())


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_is_federated_averaging_with_statistics_elsewhere(option: str) -> None:
    data = data_of()
    client = tiny_client(data, double(norm_net))
    network = plain_network(data, double(norm_net), client.network.state_dict())
    expected, kept = federated_averaging(
        network,
        data,
        sgd,
        stays_local=statistics if option == "local" else lambda name: False,
        drop_statistics=option == "drop",
    )
    federation = fit(client, data, {"batchnorm": option})
    torch.testing.assert_close(weights(federation), expected, rtol=0, atol=1e-10)
    for number, tensors in kept.items():
        for name, value in tensors.items():
            found = federation.clients.get("model", number)
            assert found is not None
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


def naive_accuracies(
    data: FederatedDataModule, network: nn.Module, state: dict[str, Tensor], batch_statistics: bool
) -> list[float]:
    """Accuracy per task, batch by batch, with running or with each batch's own statistics."""
    network = copy.deepcopy(network)
    if batch_statistics:
        for layer in network.modules():
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        state = {name: value for name, value in state.items() if not statistics(name)}
    network.eval()
    found = []
    for task in data.tasks:
        logits = [
            functional_call(network, state, (task.transform(images),))
            for images in task.test.images.split(data.eval_batch_size)
        ]
        found.append(accuracy(torch.cat(logits), task.test.labels))
    return found


@pytest.mark.parametrize("eval_batch_size", [12, 1000])
@pytest.mark.parametrize("option", OPTIONS)
def test_how_the_global_model_is_evaluated(option: str, eval_batch_size: int) -> None:
    federation, _, models = run(option, eval_batch_size=eval_batch_size)
    network, data = plain_network(data_of(), norm_net, models.before[0]), federation.data
    # The other statistics give other accuracies, so the test can fail.
    scored = {own: [naive_accuracies(data, network, state, own) for state in models.before] for own in (True, False)}
    assert scored[True] != scored[False]
    expected = scored[option != "average"]
    assert federation.accuracy.initial().tolist() == pytest.approx(expected[0])
    for row in (0, 1):
        assert federation.accuracy.compute()[row].tolist() == pytest.approx(expected[row + 1])


@pytest.mark.parametrize("option", OPTIONS)
def test_evaluation_leaves_the_network_as_it_was(option: str) -> None:
    federation, _, models = run(option)
    assert len(models.before) == 3
    for before, after in zip(models.before, models.after, strict=True):
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(all(modes) for modes in models.modes), "training goes on in training mode"
    assert list(dict(federation.network.named_buffers())) == list(initial_statistics())


@pytest.mark.parametrize("option", ["local", "drop"])
def test_statistics_and_modes_come_back_also_after_an_error(option: str) -> None:
    federation, _, _ = run(option)
    federation.network.eval()
    before = copy.deepcopy(federation.network.state_dict())
    with federation.model.evaluation_statistics():
        assert not list(federation.network.named_buffers())
    with pytest.raises(KeyError), federation.model.evaluation_statistics():
        raise KeyError
    assert not any(module.training for module in federation.network.modules())
    assert all(torch.equal(value, before[name]) for name, value in federation.network.state_dict().items())


@pytest.mark.parametrize("option", OPTIONS)
def test_personal_models_are_evaluated_with_their_own_statistics_where_they_have_any(option: str) -> None:
    data = data_of(eval_batch_size=12)
    client = tiny_client(data, norm_net, methods={"personal": PersonalLayers(["head.*"])})
    initial = copy.deepcopy(client.network.state_dict())
    federation = fit(client, data, {"batchnorm": option})
    final, network = weights(federation), plain_network(data, norm_net, initial)
    stays = [n for n in initial if n.startswith("head.") or (statistics(n) and option == "local")]
    kept = [federation.clients.get("model", number) for number in range(5)]
    assert kept.count(None) == 1, "one client is never sampled and has the initial values"
    for number, own in enumerate(kept):
        own = {name: initial[name] for name in stays} if own is None else own
        assert sorted(own) == sorted(stays)
        expected = naive_accuracies(data, network, {**final, **own}, option == "drop")
        assert federation.accuracy.compute()[number, 1].tolist() == pytest.approx(expected)


def test_dropped_statistics_are_nobodys_even_of_a_wholly_personal_model() -> None:
    data = data_of()
    client = tiny_client(data, norm_net, methods={"personal": PersonalLayers(["*"])})
    federation = fit(client, data, {"batchnorm": "drop"})
    assert not any(statistics(name) for name in federation.model.personal)
    assert federation.channel.total_uplink_bytes == 0
    network, final = plain_network(data, norm_net, weights(federation)), weights(federation)
    for number in range(5):
        expected = naive_accuracies(data, network, {**final, **(federation.clients.get("model", number) or {})}, True)
        assert federation.accuracy.compute()[number, 1].tolist() == pytest.approx(expected)


class FixedNorm(Network):
    """A BatchNorm layer in evaluation mode, with statistics of its own, as of a pretrained backbone."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.norm = nn.BatchNorm2d(input_shape[0])
        nn.init.constant_(cast(Tensor, self.norm.running_mean), 0.3)
        nn.init.constant_(cast(Tensor, self.norm.running_var), 4.0)
        self.norm.eval()
        self.head = nn.Linear(math.prod(input_shape), num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(x).flatten(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("batchnorm", OPTIONS)
def test_a_layer_in_evaluation_mode_is_tested_with_the_statistics_it_is_trained_with(batchnorm: Any) -> None:
    data = data_of(eval_batch_size=3)
    client = tiny_client(data, double(FixedNorm), sgd)
    federation = fit(client, data, {"batchnorm": batchnorm})
    assert torch.equal(cast(Tensor, client.network.norm.running_mean), torch.full((1,), 0.3).double())
    network = copy.deepcopy(client.network).eval()
    expected = []
    for task in data.tasks:
        with torch.no_grad():
            answers = network(task.transform(task.test.images)).argmax(1)
        expected.append(100 * float((answers == task.test.labels).double().mean()))
    assert federation.accuracy.compute()[-1].tolist() == pytest.approx(expected, abs=1e-4)
    x = data.tasks[0].transform(data.tasks[0].test.images)
    assert torch.equal(answer_of(client, Choice()).network(x), network(x))
