"""GPSE: what the server learns of the clients' layer inputs, against the equations in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive import plain_network, train_client
from support.naive_fot import Grown, Watch, extract, layer_rows, projector, train_images
from support.tiny import (
    CONV_INPUTS,
    MLP_INPUTS,
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
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import IID, Dirichlet, Partition, Shards
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted, Stream
from cfl.federation.channel import Channel
from cfl.methods import FOT
from cfl.methods.components.layer_inputs import covariance, sketch
from cfl.methods.components.layer_inputs.sketch import LayerSketch, Sketch

NORM_INPUTS = {"conv": 9, "fc": 8, "head": 5}


def run(data: FederatedDataModule, make: NetworkFactory, fot: FOT, **federated: Any) -> tuple[Watch, list[nn.Module]]:
    """A whole run, and the global networks at the end of each task."""
    client, watch = tiny_client(data, make, sgd, {"fot": fot}), Watch(fot)
    fit(client, data, federated, [watch])
    ends = np.cumsum(data.schedule.rounds(data.num_tasks))
    return watch, [plain_network(data, make, watch.models[end]).eval() for end in ends]


def assert_extracted(fot: FOT, watch: Watch, data: FederatedDataModule, task: int, expected: dict[str, Grown]) -> None:
    """The bases after a task span what they should, to the precision of float32 sketches."""
    end = int(np.cumsum(data.schedule.rounds(data.num_tasks))[task])
    rows = {row["layer"]: row for row in fot.report().rows if row["task"] == task}
    assert list(watch.bases[end]) == list(expected) == list(rows)
    for name, grown in expected.items():
        found = watch.bases[end][name]
        assert (rows[name]["added"], rows[name]["basis_size"]) == (grown.added, grown.basis.shape[1]), name
        assert rows[name]["residual_share"] == pytest.approx(grown.rho, rel=1e-5), name
        gram = found.double().T @ found.double()
        np.testing.assert_allclose(gram, np.eye(found.shape[1]), rtol=0, atol=1e-6)
        np.testing.assert_allclose(projector(found), projector(grown.basis), rtol=0, atol=2e-4, err_msg=name)


def nothing_yet(layers: dict[str, int], biased: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    return {name: np.zeros((d + (name in biased), 0)) for name, d in layers.items()}


def without(layers: dict[str, int], *names: str) -> dict[str, int]:
    return {name: d for name, d in layers.items() if name not in names}


# Networks, rules and options: (network, stream, layers, FOT's options, the same for the plain loop)
CASES: dict[str, tuple[NetworkFactory, Callable[[int], Stream], dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "mlp": (deep_mlp, permuted, MLP_INPUTS, {"threshold": 0.85}, {"threshold": 0.85}),
    "mlp, gpm": (
        deep_mlp,
        permuted,
        MLP_INPUTS,
        {"threshold": 0.9, "rank_rule": "gpm", "sketch_size": 2.5},
        {"threshold": 0.9, "rule": "gpm", "multiples": {"linear": 2.5}},
    ),
    "convolutions": (partial(StridedNet), permuted, CONV_INPUTS, {"threshold": 0.9}, {"threshold": 0.9}),
    "convolutions, task-incremental": (
        partial(StridedNet),
        lambda tasks: split(tasks, classes=6, train=120),
        without(CONV_INPUTS, "head"),
        {"threshold": 0.8, "sketch_size": {"conv": 1, "linear": 3}},
        {"threshold": 0.8, "multiples": {"conv": 1, "linear": 3}},
    ),
    "with biases, in small pieces": (
        partial(StridedNet),
        permuted,
        CONV_INPUTS,
        {"threshold": 0.9, "protect_bias": True, "gpse_batch_size": 7},
        {"threshold": 0.9, "biases": True, "batch": 7},
    ),
    "clients' own shares": (
        deep_mlp,
        permuted,
        MLP_INPUTS,
        {"threshold": 0.85, "residual_share": "client_mean"},
        {"threshold": 0.85, "client_mean": True},
    ),
    "one direction at least": (
        deep_mlp,
        permuted,
        MLP_INPUTS,
        {"threshold": 0.1, "minimum_rank": 1},
        {"threshold": 0.1, "minimum": 1},
    ),
    "dropout": (partial(StridedNet, dropout=0.5), permuted, CONV_INPUTS, {"threshold": 0.9}, {"threshold": 0.9}),
    "batchnorm": (norm_net, permuted, NORM_INPUTS, {"threshold": 0.9}, {"threshold": 0.9}),
    "chosen layers": (
        partial(StridedNet),
        permuted,
        without(CONV_INPUTS, "fc", "conv1"),
        {"threshold": 0.9, "layers": ["conv2", "he*"]},
        {"threshold": 0.9},
    ),
    "first layer frozen": (
        partial(StridedNet),
        permuted,
        without(CONV_INPUTS, "conv1"),
        {"threshold": 0.9, "freeze_first_layer": True},
        {"threshold": 0.9},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_extractions_are_those_of_a_plain_loop(name: str) -> None:
    """Three tasks have two extractions, and the second extends the basis of the first. Clients have unequal sizes.

    Linear layers are sketched row by row here, first convolutions by their inputs' covariance.
    """
    make, stream, layers, options, naive = CASES[name]
    data = tiny_data(stream(3), partition=UNEQUAL, schedule={"rounds_per_task": 2, "clients_per_round": 3})
    assert len({len(own) for own in data.indices[0].values()}) > 1
    fot = FOT(**options)
    watch, networks = run(data, double(make), fot)
    biased = tuple(n for n in layers if options.get("protect_bias") and networks[0].get_submodule(n).bias is not None)
    bases = nothing_yet(layers, biased)
    naive = {"multiples": {"conv": 5, "linear": 5}, **naive}
    for task in (0, 1):
        clients = data.rounds.round(2 * task + 1).clients
        expected = extract(dict.fromkeys(clients, networks[task]), data, task, bases, **naive)
        assert_extracted(fot, watch, data, task, expected)
        bases = {layer: grown.basis for layer, grown in expected.items()}
    assert any(0 < basis.shape[1] < len(basis) for basis in bases.values())


def test_the_threshold_grows_with_the_tasks_up_to_one() -> None:
    data = tiny_data(permuted(4), schedule={"rounds_per_task": 1})
    fot = FOT(threshold=0.5, threshold_increment=0.3)
    _, networks = run(data, double(mlp), fot)
    bases = nothing_yet({"layers.0": 16, "head": 8})
    for task, threshold in enumerate((0.5, 0.8, 1.0)):
        rows = [row for row in fot.report().rows if row["task"] == task]
        assert [row["threshold"] for row in rows] == pytest.approx([threshold] * 2)
        grown = extract(dict.fromkeys(range(4), networks[task]), data, task, bases, threshold, multiples={"linear": 5})
        assert [row["basis_size"] for row in rows] == [g.basis.shape[1] for g in grown.values()]
        bases = {layer: g.basis for layer, g in grown.items()}
    assert fot.report().rows[-2]["basis_size"] == 16  # threshold 1 takes all that these data span


# Which model and which clients are sketched


def test_local_models_are_sketched_as_their_clients_have_just_trained_them() -> None:
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 2})
    results = {}
    for model in ("global", "local"):
        fot = FOT(threshold=0.85, gpse_model=model)  # type: ignore[arg-type]
        watch, networks = run(data, double(deep_mlp), fot)
        plan, local = data.rounds.round(1), {}
        for client in plan.clients:
            local[client] = plain_network(data, double(deep_mlp), watch.models[1])
            train_client(local[client], data, plan, client, sgd)
            local[client].eval()
        sketched = {"global": dict.fromkeys(plan.clients, networks[0]), "local": local}[model]
        expected = extract(sketched, data, 0, nothing_yet(MLP_INPUTS), 0.85, multiples={"linear": 5})
        assert_extracted(fot, watch, data, 0, expected)
        results[model] = projector(fot.bases["layers.1"])
    assert abs(results["global"] - results["local"]).max() > 1e-2


def test_all_clients_of_the_task_or_those_of_its_last_round() -> None:
    data = tiny_data(permuted(2), num_clients=5, schedule={"rounds_per_task": 2, "clients_per_round": 2})
    results = {}
    for who, clients in (("sampled", data.rounds.round(1).clients), ("all", range(5))):
        fot = FOT(threshold=0.85, gpse_clients=who)  # type: ignore[arg-type]
        watch, networks = run(data, double(deep_mlp), fot)
        sketched = dict.fromkeys(clients, networks[0])
        expected = extract(sketched, data, 0, nothing_yet(MLP_INPUTS), 0.85, multiples={"linear": 5})
        assert_extracted(fot, watch, data, 0, expected)
        results[who] = projector(fot.bases["layers.0"])
    assert abs(results["all"] - results["sampled"]).max() > 1e-2


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
def test_batch_statistics_in_gpse_are_those_that_clients_are_evaluated_with(batchnorm: str) -> None:
    """Averaged running statistics, a client's own ones or, if no statistics are kept, those of the batch."""
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 2})
    fot = FOT(threshold=0.9, gpse_batch_size=11)
    client, watch = tiny_client(data, double(norm_net), sgd, {"fot": fot}), Watch(fot)
    kept: dict[int, dict[str, Tensor]] = {}
    grow = fot._grow

    def keep_then_grow(*given: Any) -> None:
        kept.update({c: dict(fot.context.clients.get("model", c) or {}) for c in range(4)})
        grow(*given)

    fot._grow = keep_then_grow  # type: ignore[method-assign]
    fit(client, data, {"batchnorm": batchnorm}, [watch])
    networks = {}
    for c in range(4):
        networks[c] = plain_network(data, double(norm_net), {**watch.models[2], **kept[c]}).train(batchnorm == "drop")
    assert bool(kept[0]) == (batchnorm == "local")
    expected = extract(networks, data, 0, nothing_yet(NORM_INPUTS), 0.9, multiples={"conv": 5, "linear": 5}, batch=11)
    assert_extracted(fot, watch, data, 0, expected)


def test_personal_layers_below_a_protected_one_are_the_clients_own() -> None:
    from cfl.methods import PersonalLayers

    data = tiny_data(permuted(2), schedule={"rounds_per_task": 2})
    fot, personal = FOT(threshold=0.9, layers=["layers.1"]), PersonalLayers(["layers.0.*"])
    client, watch = tiny_client(data, double(deep_mlp), sgd, {"personal": personal, "fot": fot}), Watch(fot)
    own: dict[int, dict[str, Tensor]] = {}
    grow = fot._grow

    def keep_then_grow(*given: Any) -> None:
        own.update({c: dict(fot.context.clients.get("model", c) or {}) for c in range(4)})
        grow(*given)

    fot._grow = keep_then_grow  # type: ignore[method-assign]
    fit(client, data, None, [watch])
    networks = {c: plain_network(data, double(deep_mlp), {**watch.models[2], **own[c]}) for c in range(4)}
    assert not torch.equal(own[0]["layers.0.weight"], own[1]["layers.0.weight"])
    expected = extract(networks, data, 0, nothing_yet({"layers.1": 10}), 0.9, multiples={"linear": 5})
    assert_extracted(fot, watch, data, 0, expected)


# The partition does not matter, because the server only needs sums

PARTITIONS: list[Partition] = [IID(), Shards(2), Dirichlet(alpha=0.5, min_samples=2)]


def bases_of_an_untrained_network(data: FederatedDataModule, make: NetworkFactory, fot: FOT) -> dict[str, Tensor]:
    still = partial(torch.optim.SGD, lr=0.0)
    client, watch = tiny_client(data, make, still, {"fot": fot}), Watch(fot)
    fit(client, data, None, [watch])
    return watch.bases[1]


@pytest.mark.parametrize("make", [deep_mlp, partial(StridedNet)], ids=["mlp", "convolutions"])
def test_every_partition_of_low_rank_data_gives_the_same_bases(make: NetworkFactory) -> None:
    """Three different images, 28 times each: layers have few different inputs, which any sketch recovers exactly."""
    bases: list[dict[str, Tensor]] = []
    for partition in PARTITIONS:
        stream = Permuted(Synthetic(3, [1, 8, 8], 84, 12, noise=0.0), 2)
        data = tiny_data(stream, partition=partition, num_clients=6, schedule={"rounds_per_task": 1})
        bases.append(bases_of_an_untrained_network(data, make, FOT(threshold=1.0)))
    network = tiny_client(data, make).network
    partial_layers = 0
    for name in bases[0]:
        rows = layer_rows(network, name, train_images(data, 0))
        _, values, directions = np.linalg.svd(rows, full_matrices=False)
        spanned = directions[values > 1e-5 * values[0]]
        partial_layers += len(spanned) < rows.shape[1]
        for found in bases:
            np.testing.assert_allclose(projector(found[name]), projector(spanned.T), rtol=0, atol=1e-4, err_msg=name)
    assert partial_layers >= 2


def test_every_partition_of_noisy_data_captures_the_same_energy() -> None:
    shares, sizes = [], []
    for partition in PARTITIONS:
        stream = Permuted(Synthetic(6, [1, 8, 8], 360, 12, noise=30.0), 2)
        data = tiny_data(stream, partition=partition, num_clients=6, schedule={"rounds_per_task": 1})
        basis = bases_of_an_untrained_network(data, mlp, FOT(threshold=0.9))["layers.0"].double().numpy()
        rows = train_images(data, 0).flatten(1).double().numpy()
        best = np.linalg.svd(rows, compute_uv=False) ** 2
        captured = ((rows @ basis) ** 2).sum() / (rows**2).sum()
        assert best[: basis.shape[1]].sum() / best.sum() - 0.03 < captured  # nearly the best basis of its size
        shares.append(captured)
        sizes.append(basis.shape[1])
    assert max(sizes) - min(sizes) <= 2
    assert max(shares) - min(shares) < 0.015
    assert 0.83 < min(shares) < 0.9  # a sketch of 5 d columns under-estimates the rank a little


# What GPSE must leave alone


def look_around(fot: FOT) -> list[tuple[dict[str, Tensor], list[bool]]]:
    """Return a list that each ``end_task`` fills with weights and modes before and after GPSE."""
    seen: list[tuple[dict[str, Tensor], list[bool]]] = []
    end_task = fot.end_task

    def look() -> None:
        network = fot.context.network
        seen.append((copy.deepcopy(network.state_dict()), [module.training for module in network.modules()]))

    def look_twice(plan: RoundPlan) -> None:
        look()
        end_task(plan)
        look()

    fot.end_task = look_twice  # type: ignore[method-assign]
    return seen


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("gpse_model", ["global", "local"])
def test_gpse_changes_neither_weights_nor_statistics_nor_modes(gpse_model: Any) -> None:
    class Mixed(StridedNet):
        """A network with BatchNorm statistics, and with one BatchNorm layer in evaluation mode."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, dropout=0.5)
            self.norm = nn.BatchNorm1d(6)
            self.frozen_norm = nn.BatchNorm1d(6).eval()

        def features(self, x: Tensor) -> Tensor:
            return self.frozen_norm(self.norm(super().features(x)))

    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    fot, results = FOT(threshold=0.9, gpse_model=gpse_model), []
    seen = look_around(fot)
    for methods in ({"fot": fot}, {}):
        watch = Watch()
        fit(tiny_client(data, Mixed, sgd, methods), data, None, [watch])
        results.append(watch.models[1])
    (state, modes), (state_after, modes_after) = seen[:2]
    assert modes == modes_after
    assert True in modes
    assert False in modes
    assert all(torch.equal(state[name], state_after[name]) for name in state)
    # Sketching did not change the clients' statistics before they were sent either.
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("by_covariance", [False, True])
def test_patches_are_never_all_in_memory(by_covariance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch gets its rows in pieces, also if one batch has many more patches than a piece holds."""
    data = tiny_data(
        Permuted(Synthetic(2, [1, 32, 32], 48, 4), 2), num_clients=2, schedule={"rounds_per_task": 1, "batch_size": 24}
    )
    counts: list[int] = []
    add, pieces = Sketch.add, covariance.layer_inputs

    def count(self: Sketch, rows: Tensor, basis: Tensor | None, gaussian: Tensor) -> None:
        counts.append(len(rows))
        assert rows.untyped_storage().nbytes() <= rows.numel() * rows.element_size()
        add(self, rows, basis, gaussian)

    def counted(*arguments: Any) -> Iterator[Tensor]:
        for rows in pieces(*arguments):
            counts.append(len(rows))
            assert rows.untyped_storage().nbytes() <= rows.numel() * rows.element_size()
            yield rows

    lines_of = covariance._image_lines

    def counted_lines(layer: nn.Conv2d, x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        for lines in lines_of(layer, x, dtype):
            counts.append((len(lines) - layer.kernel_size[0] + 1) * lines.shape[1])
            yield lines

    monkeypatch.setattr(Sketch, "add", count)
    monkeypatch.setattr(covariance, "layer_inputs", counted)
    monkeypatch.setattr(covariance, "_image_lines", counted_lines)
    monkeypatch.setattr(sketch, "covariance_is_cheaper", lambda *_: by_covariance)
    fit(tiny_client(data, partial(StridedNet), sgd, {"fot": FOT(layers=["conv*"])}), data)
    assert max(counts) <= (4096 if by_covariance else 2048)
    assert sum(counts) == 48 * (16 * 16 + 16 * 8)
    assert len(counts) > 4


# Several clients at a time


@pytest.mark.parametrize(("gpse_model", "batchnorm"), [("global", "average"), ("global", "drop"), ("local", "average")])
def test_threads_change_neither_messages_nor_their_order(
    gpse_model: Any, batchnorm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: each client is computed by one math thread, whatever runs beside it."""
    messages: list[tuple[list[int], dict[str, Tensor]]] = []
    uplink = Channel.uplink

    def listen(self: Channel, topic: str, payload: dict[str, Tensor], weights: Any, clients: Any) -> list[bool]:
        if topic == "fot sketch":
            messages.append((list(clients), {name: value.clone() for name, value in payload.items()}))
        return uplink(self, topic, payload, weights, clients)

    monkeypatch.setattr(Channel, "uplink", listen)
    before, found = torch.get_num_threads(), []
    sketched_in: set[int] = set()
    start = LayerSketch.__init__

    def note(*arguments: Any, **named: Any) -> None:
        sketched_in.add(threading.get_ident())
        start(*arguments, **named)

    monkeypatch.setattr(LayerSketch, "__init__", note)
    for threads in (1, 3):
        # IID clients finish together, so their local models are sketched together. Their network has no BatchNorm, as
        # its statistics would depend on the number of threads in training.
        partition, make = (UNEQUAL, norm_net) if gpse_model == "global" else (IID(), partial(StridedNet))
        data = tiny_data(num_clients=7, partition=partition, schedule={"rounds_per_task": 1, "cohort_width": 4})
        fot = FOT(threshold=0.9, gpse_model=gpse_model)
        # With learning rate 0 the network is the same for any number of threads in training.
        client = tiny_client(data, make, partial(torch.optim.SGD, lr=0.0), {"fot": fot})
        messages.clear()
        sketched_in.clear()
        try:
            torch.set_num_threads(threads)
            fit(client, data, {"batchnorm": batchnorm})
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        assert (sketched_in == {threading.get_ident()}) == (threads == 1)
        found.append((list(messages), fot.bases))
        assert not any(module._forward_pre_hooks for module in client.network.modules())
    (alone, bases), (together, bases_together) = found
    order = [clients for clients, _ in alone]
    assert order == [clients for clients, _ in together]
    assert sorted(order) == [[c] for c in range(7)]
    assert gpse_model == "local" or order == sorted(order)
    for (_, one), (_, other) in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(bases[name], bases_together[name]) for name in bases)


def test_a_client_that_fails_in_a_thread_stops_the_run() -> None:
    data, before = tiny_data(schedule={"rounds_per_task": 1}), torch.get_num_threads()
    fot = FOT()
    client = tiny_client(data, mlp, sgd, {"fot": fot})
    batches = data.client_batches

    def broken(task: int, client: int, *rest: Any) -> Any:
        if client == 2:
            raise RuntimeError("no such samples")
        return batches(task, client, *rest)

    data.client_batches = broken  # type: ignore[method-assign]
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="no such samples"):
            fit(client, data)
    finally:
        torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("in-order")]
