"""GPM on every client, against the paper's equations in a plain float64 loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive_fot import Watch, layer_rows, projector
from support.naive_memories import chosen_samples, multiply, run_rounds
from support.own_networks import Plain, WithoutElements
from support.tiny import (
    CONV_LAYERS,
    MLP_LAYERS,
    UNEQUAL,
    NetworkFactory,
    StridedNet,
    deep_mlp,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining, RandomShare
from cfl.data.partitions import IID
from cfl.data.streams import Stream
from cfl.federation.federation import Federation
from cfl.methods import FOT, GPM, RGO, Method
from cfl.models import MLP, Network
from cfl.runtime.errors import ConfigError


class PlainGPM:
    """Memories ``M [d, r]`` by client and layer, grown and used as eq 5, 6, 8 and 9 say."""

    def __init__(
        self,
        data: FederatedDataModule,
        layers: Sequence[str],
        threshold: float | dict[str, float],
        increment: float = 0.0,
        samples: int = 10**6,
        one_fewer: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        self.data, self.layers, self.increment, self.samples = data, layers, increment, samples
        self.threshold = threshold if isinstance(threshold, dict) else {"*": threshold}
        self.one_fewer, self.frozen = one_fewer, frozen
        self.memories: dict[int, dict[str, np.ndarray]] = {}
        self.sizes: dict[tuple[int, str], list[tuple[int, int, float]]] = {}  # before, after, residual share

    def epsilon(self, layer: str, task: int) -> float:
        first = next(number for pattern, number in self.threshold.items() if fnmatchcase(layer, pattern))
        return min(1.0, first + task * self.increment)

    def remember(self, network: nn.Module, task: int) -> None:
        for client in self.data.members[task].tolist():
            images = chosen_samples(self.data, task, client, self.samples, "gpm samples")
            own = self.memories.get(client)
            grown = {}
            for layer in self.layers:
                r = layer_rows(network, layer, images).T
                m = np.zeros((len(r), 0)) if own is None else own[layer]
                outside = r - m @ (m.T @ r)
                u, sigma, _ = np.linalg.svd(outside, full_matrices=False)
                total, covered, count = (r**2).sum(), (r**2).sum() - (outside**2).sum(), 0
                left = (sigma > 1e-6 * sigma[0]) & (sigma[0] > 1e-6 * total**0.5)  # smaller values are rounding
                while count < left.sum() and covered < self.epsilon(layer, task) * total:
                    covered += sigma[count] ** 2
                    count += 1
                count -= int(own is None and self.one_fewer and count > 0)
                grown[layer] = np.concatenate([m, u[:, :count]], 1)
                residual = float(((outside**2).sum() / total) ** 0.5)
                self.sizes.setdefault((task, layer), []).append((m.shape[1], grown[layer].shape[1], residual))
            self.memories[client] = grown

    def change(self, network: nn.Module, client: int) -> None:
        for layer, m in self.memories.get(client, {}).items():
            multiply(network, layer, np.eye(len(m)) - m @ m.T)
        if client in self.memories:
            for name in self.frozen:
                network.get_parameter(name).grad.zero_()


def vectors(*names: str) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


# Networks and options: (network, stream, GPM's options, the same for the plain loop)
CASES: dict[str, tuple[NetworkFactory, Callable[[int], Stream], dict[str, Any], dict[str, Any]]] = {
    "mlp": (
        deep_mlp,
        permuted,
        {"threshold": 0.9},
        {"layers": MLP_LAYERS, "threshold": 0.9, "frozen": [f"{n}.bias" for n in MLP_LAYERS]},
    ),
    "some miss tasks": (
        deep_mlp,
        permuted,
        {"threshold": 0.9},
        {"layers": MLP_LAYERS, "threshold": 0.9, "frozen": [f"{n}.bias" for n in MLP_LAYERS]},
    ),
    "few samples, thresholds by layer, as the authors' code": (
        deep_mlp,
        permuted,
        {
            "threshold": {"layers.1": 0.7, "lay*": 0.8, "*": 0.6},
            "threshold_increment": 0.1,
            "samples": 7,
            "batch_size": 3,
            "rank_rule": "code",
            "freeze_affine": False,
        },
        {
            "layers": MLP_LAYERS,
            "threshold": {"layers.0": 0.8, "layers.1": 0.7, "head": 0.6},
            "increment": 0.1,
            "samples": 7,
            "one_fewer": True,
        },
    ),
    "convolutions, task-incremental": (
        partial(StridedNet),
        lambda tasks: split(tasks, classes=6, train=120),
        {"threshold": 0.85},
        {"layers": CONV_LAYERS[:3], "threshold": 0.85, "frozen": ["conv1.bias", "fc.bias"]},
    ),
    "batchnorm, chosen layers": (
        norm_net,
        permuted,
        {"threshold": 0.8, "layers": ["fc"]},
        {"layers": ["fc"], "threshold": 0.8, "frozen": ["fc.bias", *vectors("conv_norm", "fc_norm")]},
    ),
}
# BatchNorm needs more than one sample. Clients with and without a memory share a cohort only if their sizes are equal.
EQUAL = {"batchnorm, chosen layers", "some miss tasks"}
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def memories_of(gpm: GPM, federation: Federation, client: int) -> dict[str, Tensor]:
    """A client's bases ``[d, r]``."""
    state = federation.clients.get("gpm", client)
    if state is None:
        return {}
    ranks = dict(zip(gpm._dims, state["ranks"].tolist(), strict=True))
    return {n: gpm._directions(n, [client], r)[0].T for n, r in ranks.items()}


@pytest.mark.parametrize("optimizer", [sgd, MOMENTUM], ids=["sgd", "momentum"])
@pytest.mark.parametrize("name", CASES)
def test_every_round_is_that_of_a_plain_loop(name: str, optimizer: Any) -> None:
    """Three tasks and sampled clients, so that memories are of two tasks, of one or of none."""
    make, stream, options, naive = CASES[name]
    data = tiny_data(
        stream(3),
        partition=IID() if name in EQUAL else UNEQUAL,
        participation=RandomShare(0.7) if name == "some miss tasks" else None,
        schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 3},
    )
    gpm = GPM(**options)
    client = tiny_client(data, double(make), optimizer, {"gpm": gpm})
    watch, initial = Watch(), copy.deepcopy(client.network.state_dict())
    federation = fit(client, data, None, [watch])
    plain = PlainGPM(data, **naive)
    models = run_rounds(data, double(make), initial, optimizer, plain.change, plain.remember)
    for number, (found, expected) in enumerate(zip(watch.models[1:], models, strict=True)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7, msg=lambda m, n=number: f"round {n}: {m}")
    assert plain.memories
    for who in range(data.num_clients):
        found = memories_of(gpm, federation, who)
        expected = plain.memories.get(who, {})
        assert {n: m.shape for n, m in found.items()} == {n: m.shape for n, m in expected.items()}
        for layer, m in expected.items():
            np.testing.assert_allclose(projector(found[layer]), projector(m), rtol=0, atol=1e-6)
    assert any(0 < m.shape[1] < len(m) for own in plain.memories.values() for m in own.values())
    check_report(gpm, plain)


def check_report(gpm: GPM, plain: PlainGPM) -> None:
    """The rows are means over the clients that grew their memories, and the used space is a mean over layers."""
    report = gpm.report()
    assert [(row["task"], row["layer"]) for row in report.rows] == list(plain.sizes)
    last = []
    for row, clients in zip(report.rows, plain.sizes.values(), strict=True):
        before, after, residual = (np.array(values) for values in zip(*clients, strict=True))
        used = 100 * after.mean() / len(plain.memories[0][row["layer"]])
        last += [used] * (row["task"] == report.rows[-1]["task"])
        assert (row["clients"], row["smallest_basis"], row["largest_basis"]) == (len(after), after.min(), after.max())
        means = {"basis_size": after, "added": after - before, "residual_share": residual}
        expected = {"used_space": used} | {key: values.mean() for key, values in means.items()}
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert report.figures["used_space"] == pytest.approx(np.mean(last))


class NormalisedMaps(Network):
    """Normalises maps by a scale and a shift of the maps' shape."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.norm = nn.LayerNorm(input_shape)
        self.hidden = nn.Linear(math.prod(input_shape), 12)
        self.head = nn.Linear(12, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(self.norm(x).flatten(1)))


class Recurrent(NormalisedMaps):
    """Has layers whose weights GPM cannot protect."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.scale = nn.Parameter(torch.ones(12))
        self.shortcut = nn.Conv1d(1, 1, 1)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.shortcut(x.flatten(2)).view_as(x)) * self.scale


def test_which_vectors_are_frozen() -> None:
    """Those that change old outputs in spite of protected weights, but no biases beside weights that are trained."""
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    gpm = GPM(layers=["hidden"])
    fit(tiny_client(data, double(Recurrent), sgd, {"gpm": gpm}), data)
    assert gpm._frozen == ["scale", "norm.weight", "norm.bias", "hidden.bias"]


@pytest.mark.parametrize(
    ("scenario", "make", "first"),
    [
        ("domain", partial(MLP, hidden=[12], dropout=0.0), "layers.0.weight"),
        ("class", partial(MLP, hidden=[12], dropout=0.0), "layers.0.weight"),
        ("domain", NormalisedMaps, "hidden.weight"),
    ],
)
def test_old_inputs_see_no_change_of_a_client_that_remembers_them(
    scenario: str, make: NetworkFactory, first: str
) -> None:
    """GPM's guarantee: if a client's memory holds all its inputs, its old outputs stay, up to the last layer."""
    stream, layers = (permuted(2, train=8), None) if scenario == "domain" else (split(2, classes=4, train=8), ["*"])
    data = tiny_data(
        stream,
        scenario=scenario,
        num_clients=1,
        schedule={"rounds_per_task": 2, "clients_per_round": 1, "local_epochs": 3},
    )
    drift = {}
    for label, methods in (("gpm", {"gpm": GPM(threshold=1.0, layers=layers)}), ("fedavg", {})):
        client = tiny_client(data, double(make), sgd, dict[str, Method](methods))
        watch = Watch()
        fit(client, data, None, [watch])
        images = chosen_samples(data, 0, 0, 8, "gpm samples")
        outputs = []
        for state in (watch.models[2], watch.models[-1]):
            client.network.load_state_dict(state)
            with torch.no_grad():
                outputs.append(client.network.eval()(images))
        drift[label] = float((outputs[1] - outputs[0]).abs().max())
        assert float((watch.models[-1][first] - watch.models[2][first]).abs().max()) > 1e-4
    assert drift["gpm"] < 1e-10 < 1e-2 < drift["fedavg"]


FEATURES = partial(RGO, feature_encoding=False)


@pytest.mark.parametrize(
    ("method", "scenario", "class_loss", "free"),
    [
        (FOT, "task", "all", True),
        (FOT, "class", "own", True),
        (FOT, "class", "seen", False),
        (FOT, "class", "all", False),
        (GPM, "task", "all", True),
        (GPM, "class", "all", True),
        (FEATURES, "class", "all", True),
        (partial(GPM, layers=["*"]), "class", "all", False),
        (partial(FEATURES, layers=["*"]), "class", "all", False),
    ],
)
def test_which_methods_leave_the_output_layer_free(
    method: Callable[[], Any], scenario: str, class_loss: str, free: bool
) -> None:
    data = tiny_data(split(2, classes=4), scenario=scenario, class_loss=class_loss, schedule={"rounds_per_task": 1})
    made = method()
    fit(tiny_client(data, double(mlp), sgd, {"made": made}), data)
    layers = made._layers if isinstance(made, RGO) else made._protected
    assert ("head" not in layers) == free
    assert len(layers) > 0


def test_thresholds_grow_with_the_tasks_up_to_one() -> None:
    data = tiny_data(permuted(4), schedule={"rounds_per_task": 1})
    gpm = GPM(threshold={"head": 0.5, "*": 0.6}, threshold_increment=0.25)
    fit(tiny_client(data, mlp, sgd, {"gpm": gpm}), data)
    found = {name: [row["threshold"] for row in gpm.report().rows if row["layer"] == name] for name in gpm._dims}
    assert found == {"layers.0": pytest.approx([0.6, 0.85, 1.0]), "head": pytest.approx([0.5, 0.75, 1.0])}
    assert gpm.report().rows[-2]["basis_size"] == 16  # a threshold of 1 takes all directions that these data span


def test_a_memory_that_suffices_does_not_grow() -> None:
    """The same task comes twice and is hardly trained. The second time adds no direction."""
    data = tiny_data(permuted(3), num_clients=2, schedule={"rounds_per_task": 1}, repartition=False)
    data.tasks[1] = data.tasks[0]
    gpm = GPM(threshold=0.9)
    fit(tiny_client(data, mlp, partial(torch.optim.SGD, lr=1e-6), {"gpm": gpm}), data)
    rows = gpm.report().rows
    assert [row["added"] > 0 for row in rows] == [True, True, False, False]
    assert [row["residual_share"] == 1 for row in rows] == [True, True, False, False]


def test_clients_that_join_late_remember_and_freeze_nothing() -> None:
    """In a round of late clients only, the model moves as by federated averaging."""
    data = tiny_data(permuted(2), num_clients=4, participation=Joining(2, 2), schedule={"rounds_per_task": 1})
    late = sorted(set(data.members[1].tolist()) - set(data.members[0].tolist()))
    assert late
    found = {}
    for label, methods in (("gpm", {"gpm": GPM(threshold=0.9)}), ("fedavg", {})):
        data = tiny_data(permuted(2), num_clients=4, participation=Joining(2, 2), schedule={"rounds_per_task": 1})
        plan = data.rounds.round(1)
        data.rounds._plan = {0: data.rounds._plan(0), 1: replace(plan, clients=tuple(late))}.__getitem__  # type: ignore[method-assign]
        watch = Watch()
        federation = fit(tiny_client(data, mlp, sgd, dict[str, Method](methods)), data, None, [watch])
        found[label] = watch.models[-1]
        assert federation.clients.holders("gpm") == (data.members[0].tolist() if methods else [])
    assert all(torch.equal(found["gpm"][name], found["fedavg"][name]) for name in found["fedavg"])


def test_directions_are_kept_in_blocks_over_their_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for block in (3, 32):
        monkeypatch.setattr("cfl.methods.gpm.BLOCK", block)
        data = tiny_data(permuted(3), schedule={"rounds_per_task": 1})
        gpm = GPM(threshold=0.9)
        watch = Watch()
        federation = fit(tiny_client(data, double(mlp), sgd, {"gpm": gpm}), data, None, [watch])
        found[block] = watch.models[-1], memories_of(gpm, federation, 2)
    assert found[3][1]["layers.0"].shape[1] > 6
    for small, large in zip(*found.values(), strict=True):
        torch.testing.assert_close(small, large, rtol=0, atol=1e-12)


def test_what_is_sent_and_kept() -> None:
    data = tiny_data(permuted(2), num_clients=4, schedule={"rounds_per_task": 1, "clients_per_round": 2})
    runs = {}
    for label, methods in (
        ("plain", {}),
        ("all", {"gpm": GPM()}),
    ):
        runs[label] = fit(tiny_client(data, mlp, sgd, dict[str, Method](methods)), data)
    model = sum(p.numel() * 4 for p in runs["plain"].network.parameters())
    extra = {n: r.channel.total_downlink_bytes - runs["plain"].channel.total_downlink_bytes for n, r in runs.items()}
    assert extra == {"plain": 0, "all": 4 * model}
    assert len({r.channel.total_uplink_bytes for r in runs.values()}) == 1
    gpm = runs["all"].methods["gpm"]
    assert gpm.report().figures["memory_bytes"] == 32 * 4 * (16 + 8)  # one block for each layer


def test_storage_is_that_of_the_client_that_keeps_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfl.methods.gpm.BLOCK", 1)
    data = tiny_data(permuted(3), num_clients=4, schedule={"rounds_per_task": 1, "clients_per_round": 2})
    federation = fit(tiny_client(data, mlp, sgd, {"gpm": GPM(0.9, samples=3)}), data)
    kept = dict.fromkeys(range(4), 0)
    for topic in federation.clients.state_dict():
        for client in federation.clients.holders(topic) if topic.startswith("gpm ") else ():
            table = federation.clients.get(topic, client)
            assert table is not None
            kept[client] += table["directions"].numel() * 4
    gpm = federation.methods["gpm"]
    assert gpm.client_storage() == max(kept.values()) > min(kept.values()) > 0
    assert gpm.report().figures["memory_bytes"] == sum(kept.values()) / 4
    again = GPM()
    again.load_state_dict(gpm.state_dict())
    assert again.client_storage() == gpm.client_storage()


def test_optimizers_that_undo_the_projection_are_refused() -> None:
    data = tiny_data(schedule={"rounds_per_task": 1})
    with pytest.raises(ConfigError, match=r"methods\.gpm"):
        fit(tiny_client(data, mlp, partial(torch.optim.Adam, lr=0.01), {"gpm": GPM()}), data)


def test_clipping_that_turns_gradients_is_refused() -> None:
    data = tiny_data(schedule={"rounds_per_task": 1})

    def run(**clipping: Any) -> bool:
        return fit(tiny_client(data, mlp, sgd, {"gpm": GPM()}), data, gradient_clip_val=0.5, **clipping).finished

    with pytest.raises(ConfigError, match=r"trainer\.gradient_clip_algorithm = 'value'.*norm.*methods\.gpm"):
        run(gradient_clip_algorithm="value")
    assert run(gradient_clip_algorithm="norm")
    assert run()  # by norm is the default


def test_parameters_without_elements_change_nothing() -> None:
    def run(network: type[Plain]) -> dict[str, Tensor]:
        data = tiny_data(permuted(2))
        found = weights(fit(tiny_client(data, double(network), sgd, {"gpm": GPM(0.9)}), data))
        return {name: value for name, value in found.items() if value.numel()}

    torch.testing.assert_close(run(WithoutElements), run(Plain), rtol=0, atol=1e-12)
