"""Additive parameter decomposition against runs written out, alone and beside other methods."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.naive_decomposed import assert_the_same, data_of, written_out
from support.tiny import (
    ConvNet,
    Poison,
    double,
    fit,
    kept_by,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
)
from torch import Tensor, nn

from cfl.data.client_clocks import rounds_of_clients
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.methods import APD, ER, EWC, FOT, GPM, RGO, FedProx, FedWeIT, Method, PersonalLayers, SingleTask
from cfl.models import MLP, Network
from cfl.models.decomposition import decomposed_layers, is_base
from cfl.runtime.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "sparsity": 0.01,
    "mask_sparsity": 0.003,
    "consolidation": 2.0,
    "weight_decay": 0.02,
    "retroactive": True,
}
FROZEN = {**OPTIONS, "retroactive": False}
ADAM = partial(torch.optim.Adam, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("stream", "make", "options", "optimizer", "width", "engine", "beside"),
    [
        (None, mlp, OPTIONS, ADAM, 2, "vmap", None),
        (None, mlp, FROZEN, MOMENTUM, 1, "workers", None),
        (split(3, classes=6), ConvNet, OPTIONS, sgd, 2, "workers", None),
        (None, mlp, OPTIONS, MOMENTUM, 1, "vmap", "local"),
        (split(3, classes=6), mlp, FROZEN, ADAM, 2, "vmap", "local"),
        (None, mlp, OPTIONS, ADAM, 2, "vmap", "prox"),
        (None, ConvNet, FROZEN, sgd, 1, "vmap", "prox"),
    ],
)
def test_a_whole_run_is_the_one_written_out(
    stream: Any, make: Any, options: dict[str, Any], optimizer: Any, width: int, engine: Any, beside: str | None
) -> None:
    """APD with averaged bases, with bases of each client's own (Local-APD), and with FedProx's pull (FedProx-APD)."""
    others: dict[str, Method] = {"local": {"own": PersonalLayers()}, "prox": {"prox": FedProx(0.7)}}.get(
        beside or "", {}
    )
    data = data_of(stream, width)
    method = APD(**options)
    federation = fit(tiny_client(data, double(make), optimizer, {"apd": method, **others}, EngineOptions(engine)), data)
    fresh = tiny_client(data, double(make), optimizer, {"apd": APD(**options)})
    run = {"make_optimizer": optimizer, "lends": False, "exchange": "none" if beside == "local" else "mean"}
    naive = written_out(fresh, data, make, method, options, mu=0.7 if beside == "prox" else 0.0, **run)
    assert_the_same(federation, method, naive)
    bases = sum(p.numel() for n, p in federation.network.named_parameters() if is_base(n))
    sent = {} if beside == "local" else {"update": 6 * 2 * bases * 8}
    assert federation.channel.uplink_bytes == sent


@pytest.mark.parametrize(
    ("options", "optimizer", "width", "sampled", "local"),
    [(OPTIONS, ADAM, 2, 1.0, False), (FROZEN, MOMENTUM, 1, 2, False), (OPTIONS, sgd, 2, 1.0, True)],
)
def test_clients_may_change_tasks_each_in_its_own_round(
    options: dict[str, Any], optimizer: Any, width: int, sampled: Any, local: bool
) -> None:
    data = data_of(split(3, classes=6), width, rounds_per_task=3, clients_per_round=sampled, clock_spread=0.67)
    clocks = rounds_of_clients([3] * 3, 0.67, 3, data.seed).tolist()
    assert len({tuple(own) for own in clocks}) == 3
    others: dict[str, Method] = {"own": PersonalLayers()} if local else {}
    method = APD(**options)
    federation = fit(tiny_client(data, double(mlp), optimizer, {"apd": method, **others}), data)
    fresh = tiny_client(data, double(mlp), optimizer, {"apd": APD(**options)})
    run = {"make_optimizer": optimizer, "lends": False, "exchange": "none" if local else "mean", "clocks": clocks}
    assert_the_same(federation, method, written_out(fresh, data, mlp, method, options, **run))


def test_tasks_to_come_are_left_alone_behind_a_client_that_is_further_on() -> None:
    """A client gets no gradients for later tasks, though a client that is further on used the same memory before."""
    seen: list[int] = []

    class Looks(Method):
        client_clocks = True

        def adjust_gradients(self, cohort: Cohort) -> None:
            seen.append(cohort.task)
            (layer,) = decomposed_layers(self.context.network)
            gradient = cohort.parameters[layer.earlier].grad
            if gradient is None:
                assert cohort.task == 0
                return
            assert not gradient[:, cohort.task :].any()
            assert gradient[:, : cohort.task].any() == (cohort.task > 0)

    data = data_of(split(3, classes=6), 1, rounds_per_task=3, clock_spread=0.67)
    methods: dict[str, Method] = {"apd": APD(**OPTIONS), "looks": Looks()}
    fit(tiny_client(data, double(mlp), ADAM, methods), data)
    assert any(later < task for task, later in pairwise(seen)), "nobody was further on"


def test_a_model_is_validated_without_entries_up_to_the_threshold() -> None:
    data = data_of()
    method = APD(**OPTIONS, threshold=0.05)
    federation = fit(tiny_client(data, mlp, ADAM, {"apd": method}), data)
    model = federation.clients.get("model", 0)
    assert model is not None
    found = method.as_tested(model)
    adaptive = {layer.adaptive for layer in decomposed_layers(federation.network)}
    for name, value in model.items():
        if name in adaptive:
            assert torch.equal(found[name], value * (value.abs() > 0.05))
            assert not torch.equal(found[name], value)
        else:
            assert found[name] is value


def test_the_report_is_of_the_sets_with_which_clients_ended_the_last_task() -> None:
    """The summary's share counts all entries of the layers alike, however large each layer is."""
    data = data_of()
    method = APD(**OPTIONS, threshold=0.05)
    federation = fit(tiny_client(data, double(partial(MLP, hidden=[9, 4])), ADAM, {"apd": method}), data)
    layers = {layer.name: layer for layer in decomposed_layers(federation.network)}
    rows = [row for row in method.report().rows if row["task"] == 2]
    ended = [client for client in range(3) if method._tasks.latest([client]) == [2]]
    assert [(row["client"], row["layer"]) for row in rows] == [(client, name) for client in ended for name in layers]
    above = []
    for row in rows:
        own, layer = kept_by(federation)[row["client"]], layers[row["layer"]]
        above.append((own[layer.adaptive].abs() > 0.05).double().flatten())
        assert row["adaptive_share"] == pytest.approx(float(above[-1].mean()))
        assert row["mean_gate"] == pytest.approx(float(torch.sigmoid(own[layer.mask]).mean()))
    assert len({len(of_layer) for of_layer in above}) == len(layers) == 2
    assert method.report().figures["adaptive_share"] == pytest.approx(float(torch.cat(above).mean()))


@pytest.mark.parametrize(("adaptive_from", "draws"), [("initial", "common"), ("current", "own")])
def test_what_a_task_begins_with(adaptive_from: Any, draws: Any) -> None:
    """A task begins with A a third of a base, new masks and biases (common or per client) and the initial head."""
    begun: dict[tuple[int, int], dict[str, Tensor]] = {}

    class Begun(Method):
        def start_clients(self, cohort: Cohort) -> None:
            tensors = {**cohort.parameters, **cohort.buffers}
            for row, client in enumerate(cohort.clients):
                own = {name: value[row].detach().clone() for name, value in tensors.items()}
                begun.setdefault((cohort.task, client), own)

    data = data_of()
    method = APD(**OPTIONS, adaptive_from=adaptive_from, draws=draws)
    client = tiny_client(data, norm_net, ADAM, {"apd": method, "begun": Begun()})
    initial = {n: t.detach().clone() for n, t in client.network.state_dict().items()}
    layers = decomposed_layers(client.network)
    fit(client, data)
    drawn = {name for x in layers for name in (x.mask, x.bias)}
    for (task, client_id), own in begun.items():
        for x in layers:
            start = own if adaptive_from == "current" else initial
            torch.testing.assert_close(own[x.adaptive], start[x.base] / 3, rtol=0, atol=1e-7)
            assert not task or not torch.equal(own[x.base], initial[x.base])
        others = [theirs for (at, _), theirs in begun.items() if at == task]
        earlier = [theirs for (at, c), theirs in begun.items() if at != task and c == client_id]
        for name in drawn:
            alike = [torch.equal(theirs[name], own[name]) for theirs in others]
            assert len(alike) > 1
            assert all(alike) if draws == "common" else sum(alike) == 1  # itself
            assert not any(torch.equal(theirs[name], own[name]) for theirs in earlier)
        for name in ("head.weight", "head.bias", "conv_norm.weight", "conv_norm.running_mean"):
            assert torch.equal(own[name], initial[name])


def test_who_trains_to_nan_begins_the_task_once_more() -> None:
    started: list[tuple[int, int]] = []

    class Counts(APD):
        def _begin(self, cohort: Cohort, positions: Any) -> None:
            super()._begin(cohort, positions)
            started.extend((cohort.round, cohort.clients[position]) for position in positions)

    data = data_of(clients_per_round=1.0, rounds_per_task=2)
    method = Counts(**OPTIONS)
    client = tiny_client(data, mlp, sgd, {"apd": method, "poison": Poison(1, 2)})
    federation = fit(client, data, {"on_bad_update": "skip"})
    again = [(3, 1)]
    assert sorted(started) == sorted([(r, c) for r in (0, 2, 4) for c in range(3)] + again)
    assert federation.channel.skipped == [(2, 1, 1)]
    assert all(bool(torch.isfinite(v).all()) for own in kept_by(federation).values() for v in own.values())
    assert [method._tasks.stored(1, task) is not None for task in range(3)] == [True, True, False]


def test_terms_without_coefficients_leave_gradients_alone() -> None:
    data = data_of()
    method = APD(sparsity=0, consolidation=0, weight_decay=0)
    fit(tiny_client(data, mlp, sgd, {"apd": method}), data)
    assert not method.changes_gradients
    assert APD().changes_gradients


@pytest.mark.parametrize(
    ("network", "methods", "settings", "key"),
    [
        (mlp, {"apd": APD(), "also": FedWeIT()}, {}, "methods"),
        (mlp, {"apd": APD(), "also": RGO(share=1.0)}, {}, "methods"),
        (mlp, {"apd": APD(), "also": FOT()}, {}, "methods"),
        (mlp, {"apd": APD(), "also": GPM()}, {}, "methods"),
        (partial(MLP, hidden=[], dropout=0.0), {"apd": APD()}, {}, "model.network"),
        (mlp, {"apd": APD(), "also": EWC()}, {}, "methods"),
        (mlp, {"apd": APD(), "also": ER()}, {}, "methods"),
        (mlp, {"also": SingleTask(), "apd": APD()}, {}, "methods"),
        (mlp, {"apd": APD()}, {"exposure": "cumulative"}, "data.exposure"),
        (mlp, {"apd": APD()}, {"scenario": "class"}, "data.scenario"),
    ],
    ids=[
        "twice",
        "permuted",
        "server's projection",
        "clients' projections",
        "nothing to decompose",
        "held to weights of another task",
        "samples of another task",
        "models of tasks beside models of tasks",
        "cumulative",
        "class",
    ],
)
def test_what_cannot_work_is_refused(network: Any, methods: Any, settings: dict[str, Any], key: str) -> None:
    stream = split() if "scenario" in settings else None
    data = tiny_data(stream, **settings)
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, network, sgd, methods), data)
    assert caught.value.key == key


class Breaks(Method):
    """A client's head gets a gradient of NaN in one round, as if it had diverged."""

    task_free = True

    def adjust_gradients(self, cohort: Cohort) -> None:
        if cohort.round == 4 and 1 in cohort.clients:
            cohort.gradients["head.weight"][cohort.clients.index(1)] = torch.nan


@pytest.mark.parametrize("width", [1, 3])
def test_clipping_beside_a_diverged_client_leaves_other_clients_alone(width: int) -> None:
    """Clipping multiplies a diverged client's gradients by NaN. Later clients in the same memory must not see them."""
    data = tiny_data(permuted(3), num_clients=5, schedule={"clients_per_round": 5, "cohort_width": width})
    client = tiny_client(data, methods={"apd": APD(consolidation=1.0), "breaks": Breaks()})
    federation = fit(client, data, {"on_bad_update": "skip"}, gradient_clip_val=1.0)
    assert federation.channel.skipped == [(4, 1, 1)]


class Unused(Network):
    """Has a layer that its forward pass does not use."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.used = nn.Linear(math.prod(input_shape), 5)
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.used(x.flatten(1)))


@pytest.mark.parametrize("method", [APD, FedWeIT])
def test_a_layer_that_is_not_used_keeps_its_base(method: type[APD]) -> None:
    data = tiny_data()
    federation = fit(tiny_client(data, Unused, sgd, {"decomposed": method(**OPTIONS)}), data)
    start = dict(tiny_client(data, Unused, sgd, {"decomposed": method(**OPTIONS)}).network.named_parameters())
    for layer in decomposed_layers(federation.network):
        assert torch.equal(layer.weight, start[layer.base]) == (layer.name == "unused")
