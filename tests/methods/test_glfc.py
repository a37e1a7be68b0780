"""GLFC: clients notice new data, keep exemplars and minimise its loss; the proxy server picks the old model."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from support.naive import plain_network
from support.naive_augmentation import augmented
from support.tiny import Poison, Rounds, double, fit, mlp, norm_net, sgd, split, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.samples import Samples
from cfl.data.schedule import RoundPlan
from cfl.data.sources import Synthetic
from cfl.data.task_handles import unwrap_task
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import GLFC, CFeD, Method, PersonalLayers
from cfl.methods.components.glfc_proxy import ProxyServer
from cfl.methods.components.gradient_inversion import GradientEncoder
from cfl.methods.context import Context
from cfl.methods.glfc import compensation
from cfl.models import MLP, Network
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

QUICK = {"size": 12, "perturbation_steps": 2, "inversion_steps": 1, "images": 1}
fast = partial(torch.optim.SGD, lr=2.0)  # the loss is a mean over outputs, so gradients are small
wide_mlp = partial(MLP, hidden=[24], dropout=0.0)


def data_of(width: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round, three tasks of two classes and three rounds."""
    return tiny_data(
        split(3, classes=6, train=120),
        num_clients=5,
        scenario="class",
        partition=Dirichlet(1.0, 3),
        schedule={"rounds_per_task": 3, "clients_per_round": 3, "cohort_width": width, "local_epochs": 3},
        **options,
    )


def run(
    method: GLFC,
    data: FederatedDataModule | None = None,
    network: Any = wide_mlp,
    others: Mapping[str, Method] | None = None,
    **options: Any,
) -> Federation:
    data = data_of() if data is None else data
    return fit(tiny_client(data, double(network), fast, {"glfc": method, **(others or {})}), data, **options)


# Clients notice new data and remember old ones.


def entropy(logits: Tensor) -> float:
    """Mean entropy of the softmax over samples, in nats."""
    total = 0.0
    for row in logits.tolist():
        exponentials = [math.exp(z) for z in row]
        for value in exponentials:
            p = value / sum(exponentials)
            total -= p * math.log(p) if p > 0 else 0.0
    return total / len(logits)


def herded(features: Tensor, count: int) -> list[int]:
    """Choose rows one by one, each so that the mean of the chosen rows is closest to the mean of all."""
    chosen: list[int] = []
    while len(chosen) < min(count, len(features)):
        left = [row for row in range(len(features)) if row not in chosen]
        means = {row: features[[*chosen, row]].mean(0) for row in left}
        chosen.append(min(left, key=lambda row: float((means[row] - features.mean(0)).norm())))
    return chosen


class Memory:
    """A client by the paper: its last entropy, tasks looked at, and exemplars by class as (task, index)."""

    def __init__(self, data: FederatedDataModule, client: int, threshold: float) -> None:
        self.data, self.client, self.threshold = data, client, threshold
        self.last, self.looked_at = 0.0, list[int]()
        self.exemplars: dict[int, list[tuple[int, int]]] = {}
        self.signals = 0

    def look(self, network: torch.nn.Module, task: int) -> bool:
        samples, own = self.data.tasks[task], self.data.indices[task][self.client]
        with torch.no_grad():
            now = entropy(network(samples.transform(samples.train.images[own]).double()))
        signals = not self.looked_at or now - self.last > self.threshold
        if not self.looked_at or self.looked_at[-1] != task:
            self.looked_at.append(task)
        if signals and len(self.looked_at) > 1:
            self.remember(network, self.looked_at[-2])
        self.last = now
        return signals

    def remember(self, network: Any, before: int) -> None:
        task = self.data.tasks[before]
        own = self.data.indices[before][self.client]
        labels = (task.train.labels[own] + 2 * before).tolist()
        count = 12 // len({*labels, *self.exemplars})
        self.exemplars = {output: kept[:count] for output, kept in self.exemplars.items()}
        with torch.no_grad():
            features = network.features(task.transform(task.train.images[own]).double())
        features = features / features.norm(dim=1, keepdim=True)
        for output in sorted(set(labels)):
            rows = [row for row, label in enumerate(labels) if label == output]
            picked = herded(features[rows], count)
            self.exemplars[output] = [(before, int(own[rows[row]])) for row in picked]


@pytest.mark.parametrize("width", [1, 3])
def test_memories_follow_from_entropies(width: int) -> None:
    """Entropies, signals and exemplars equal those computed anew from every round's model and client's data."""
    data, rounds, threshold = data_of(width), Rounds(), 0.2
    method = GLFC(threshold=threshold, **QUICK)  # type: ignore[arg-type]
    client = tiny_client(data, double(wide_mlp), fast, {"glfc": method})
    models = [copy.deepcopy(client.network.state_dict())]
    federation = fit(client, data, callbacks=[rounds])
    models += rounds.models
    memories = [Memory(data, number, threshold) for number in range(5)]
    signals: dict[int, int] = {}
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        network = plain_network(data, double(wide_mlp), models[number])
        for member in plan.clients:
            signals[number] = signals.get(number, 0) + memories[member].look(network, plan.task)
    assert sum(signals.values()) > 7  # clients' first rounds, and some of new data
    assert sum(signals.values()) < 20  # not in every round
    for memory in memories:
        kept = federation.clients.get("glfc", memory.client)
        assert kept is not None
        assert float(kept["entropy"]) == pytest.approx(memory.last, abs=1e-9)
        for name, task in zip(("before", "last"), [None, *memory.looked_at][-2:], strict=True):
            of, index = data.global_index.split(data.handles.global_index(kept[name][kept[name] >= 0]))
            own = [] if task is None else sorted(data.indices[task][memory.client])
            assert sorted(index.tolist()) == own
            assert bool((kept[name][kept[name] >= 0].diff() > 0).all()), "in the order of handles"
            assert set(of.tolist()) == ({task} if own else set())
        assert set(kept["learned"].nonzero().flatten().tolist()) == set(memory.exemplars)
        held = kept["place"] >= 0
        tasks, index = data.global_index.split(data.handles.global_index(kept["place"][held]))
        found: dict[int, list[tuple[int, int]]] = {}
        for task, at, output in zip(tasks.tolist(), index.tolist(), kept["output"][held].tolist(), strict=True):
            found.setdefault(output, []).append((task, at))
        # As sets, because of two samples either may come first.
        assert {o: set(kept) for o, kept in found.items()} == {o: set(kept) for o, kept in memory.exemplars.items()}
    assert sum(len(m.exemplars) > 2 for m in memories) >= 2
    assert [row["clients"] for row in method.report().rows] == [n for n in signals.values() if n]


class Entropies(Callback):
    """Records the entropies that clients keep, after every round."""

    def __init__(self) -> None:
        self.noted: list[list[float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:
        assert pl_module.federation is not None
        tables = [pl_module.federation.clients.get("glfc", client) for client in range(3)]
        self.noted.append([float(table["entropy"]) for table in tables if table is not None])


def undecided(input_shape: tuple[int, int, int], num_outputs: int) -> Network:
    """A network that gives all outputs the same logit."""
    network = mlp(input_shape, num_outputs)
    for parameter in network.head.parameters():
        nn.init.zeros_(parameter)
    return network


@pytest.mark.parametrize(
    ("class_loss", "threshold", "signals"),
    [("seen", 0.3, {0: 3, 3: 3, 6: 3}), ("seen", 1.2, {0: 3}), ("all", 0.3, {0: 3})],
)
def test_entropies_rise_with_the_outputs_of_a_new_task(
    class_loss: Any, threshold: float, signals: dict[int, int]
) -> None:
    """The entropy of a model that never learns rises from log 2 by log 2, then by log 3/2, if outputs join with a task.

    Clients signal if the rise is above the threshold. With all outputs in the loss, they signal only in their first
    rounds.
    """
    data = tiny_data(
        split(3, classes=6, train=120),
        num_clients=3,
        scenario="class",
        class_loss=class_loss,
        schedule={"rounds_per_task": 3},
    )
    method, watch = GLFC(**{**QUICK, "threshold": threshold}), Entropies()  # type: ignore[arg-type]
    still = partial(torch.optim.SGD, lr=0.0)
    fit(tiny_client(data, double(undecided), still, {"glfc": method}), data, callbacks=[watch])
    for number, noted in enumerate(watch.noted):
        outputs = 6 if class_loss == "all" else 2 * (number // 3 + 1)
        assert noted == pytest.approx([math.log(outputs)] * 3, rel=0, abs=1e-12)
    assert len(watch.noted) == 9
    assert {row["round"]: row["clients"] for row in method.report().rows} == signals
    assert [row["new_task"] for row in method.report().rows] == [1] * len(signals)
    assert method.report().figures["signals"] == sum(signals.values())


def test_a_memory_smaller_than_the_classes_learned_holds_the_latest() -> None:
    """The memory holds one exemplar of each of the latest classes."""
    data = tiny_data(split(2), scenario="class", schedule={"rounds_per_task": 1})
    federation = fit(tiny_client(data, mlp, fast), data)
    for size, held in ((2, {2, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (7, {0, 1, 2, 3})):
        method = GLFC(size)
        method.setup(Context(federation))
        table = method._empty
        for task in (0, 1):
            places = torch.from_numpy(data.global_index.of(task, data.indices[task][0]))
            table = method._remember(table, federation.model.state_tensors(), places)
        outputs = table["output"][table["place"] >= 0].tolist()
        assert set(outputs) == held
        assert len(outputs) == len(held)
        assert table["learned"].all()


def test_replayed_samples_are_augmented_as_own_ones_are() -> None:
    """The augmentation is drawn by (round, step, sample)."""
    method, watch = Chosen(threshold=0.0, **QUICK), Watch()  # type: ignore[arg-type]
    data = tiny_data(
        split(2),
        num_clients=3,
        scenario="class",
        schedule={"rounds_per_task": 2, "local_epochs": 3},
        augmentation=CropFlip(1),
    )
    run(method, data, others={"watch": watch})
    replayed = unchanged = 0
    for _, number, clients, batch in watch.steps:
        for added in batch.added:
            for row, client in enumerate(clients):
                tasks, index = data.global_index.split(data.handles.global_index(method.places[number, client]))
                held = list(zip(tasks.tolist(), index.tolist(), strict=True))
                seen = [augmented(data, *sample, number, batch.step) for sample in held]
                stored = data.inputs.of_tasks(tasks, index)[0]
                for x in added.x[row][added.mask[row]]:
                    assert any(torch.equal(image, x) for image in seen)
                    replayed += 1
                    unchanged += any(torch.equal(image, x) for image in stored)
    assert replayed > 50
    assert unchanged < replayed / 2


@pytest.mark.parametrize("size", [1, 3])
def test_so_many_remembered_samples_join_a_step(size: int) -> None:
    """``batch_size`` exemplars, or all that a client has if these are fewer."""
    method, watch = Chosen(threshold=0.0, batch_size=size, **QUICK), Watch()  # type: ignore[arg-type]
    run(method, others={"watch": watch})
    counts: set[int] = set()
    for _, number, clients, batch in watch.steps:
        for added in batch.added:
            for row, client in enumerate(clients):
                takes_part = bool(batch.mask[row].any())
                expected = min(size, len(method.places[number, client])) if takes_part else 0
                assert int(added.mask[row].sum()) == expected
                counts.add(expected)
    assert size in counts


def test_nobody_tells_it_where_tasks_end() -> None:
    method = GLFC(**QUICK)  # type: ignore[arg-type]
    assert method.task_free
    federation = run(method, data_of(exposure="asynchronous"))
    assert federation.finished
    for client in range(5):  # clients keep samples of the last two periods in which they took part
        kept, data = federation.clients.get("glfc", client), federation.data
        assert kept is not None
        took_part = [data.rounds.task_of(r) for r in range(data.num_rounds) if client in data.rounds.round(r).clients]
        for name, period in zip(("before", "last"), [None, *sorted(set(took_part))][-2:], strict=True):
            found = data.handles.global_index(kept[name][kept[name] >= 0])
            assert bool((kept[name][kept[name] >= 0].diff() > 0).all()), "in the order of handles"
            assert sorted(found.tolist()) == ([] if period is None else data.trained_on(period)[client].tolist())


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_signal_finds_the_data_of_before(late: int) -> None:
    """The memory has the classes of the previous task, whether the signal comes with the new data or rounds later."""

    class Slow(GLFC):
        """GLFC that signals in one round of the second task only."""

        def start_clients(self, cohort: Cohort) -> None:
            self.threshold = -100.0 if cohort.round == 3 + late else 100.0
            super().start_clients(cohort)

    data = tiny_data(split(2), num_clients=3, scenario="class", schedule={"rounds_per_task": 3})
    method = Slow(**QUICK)  # type: ignore[arg-type]
    federation = run(method, data)
    assert [row["round"] for row in method.report().rows] == [0, 3 + late]
    for client in range(3):
        kept = federation.clients.get("glfc", client)
        assert kept is not None
        held = data.handles.global_index(kept["place"][kept["place"] >= 0])
        assert len(held) > 8
        assert set(held.tolist()) <= set(data.client_global_index(0, client).tolist())
        assert kept["learned"].tolist() == [True, True, False, False]


def shipped() -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of method and data in ``configs/methods/glfc.yaml``."""
    content = yaml.safe_load((Path(__file__).parents[2] / "configs" / "methods" / "glfc.yaml").read_text())
    assert set(content) == {"data", "methods"}
    return content["methods"]["glfc"]["init_args"], content["data"]


@pytest.mark.parametrize("classes", [4, 8])
def test_the_file_that_comes_with_it_lets_clients_remember(classes: int) -> None:
    """Every client notices both tasks, each in its first round, and fills its memory."""
    options, of_data = shipped()
    method = GLFC(**{**options, "perturbation_steps": 2, "inversion_steps": 1, "images": 1})
    data = tiny_data(
        split(2, classes=classes, train=160),
        num_clients=3,
        scenario="class",
        schedule={"rounds_per_task": 4, "local_epochs": 4},
        **of_data,
    )
    federation = run(method, data)
    signals = [row["clients"] for row in method.report().rows]
    assert signals == [3, 3]
    for client in range(3):
        kept = federation.clients.get("glfc", client)
        assert kept is not None
        held = data.handles.global_index(kept["place"][kept["place"] >= 0])
        assert sorted(held.tolist()) == data.client_global_index(0, client).tolist()  # there is room for all


def test_what_a_client_stores() -> None:
    """Images of 16 bytes with labels, in the memory (with ranks) and of the previous data, and one old model."""
    data, method = data_of(), GLFC(**QUICK)  # type: ignore[arg-type]
    federation = run(method, data)
    most = max(len(own) for task in data.indices for own in task.values())
    model = sum(t.numel() * 8 for t in federation.model.shared_tensors().values())
    assert method.client_storage() == 12 * (16 + 2) + most * (16 + 1) + model + 8 + 6


# What clients minimise.


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def bce(logits: list[float], targets: list[float], outputs: list[int]) -> float:
    """Binary cross-entropy, averaged over the given outputs."""
    each = [
        -targets[o] * math.log(sigmoid(logits[o])) - (1 - targets[o]) * math.log(1 - sigmoid(logits[o]))
        for o in outputs
    ]
    return sum(each) / len(outputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("distils", [False, True])
def test_the_loss_is_the_papers(masked: bool, learned: bool, distils: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    count, outputs = 9, 4
    logits = torch.randn(count, outputs, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 2, 0, 3, 1, 2])
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    source = torch.tensor([0, 0, 0, 0, 0, 1, 1, 7, 7])  # own samples, the memory's, another method's
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    group = torch.where(y < 2, 2, 1) if learned else torch.zeros_like(y)
    old = torch.full((count, outputs), -1.0, dtype=torch.float64)
    if distils:
        old[:, :2] = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    allowed = torch.tensor([True, True, True, False]) | (y == 3)[:, None]
    data = tiny_data(split(2), scenario="class", schedule={"rounds_per_task": 1})
    method = GLFC(**QUICK)  # type: ignore[arg-type]
    fit(tiny_client(data, mlp, fast, {"glfc": method}), data)
    extras = {"glfc group": group, "glfc old": old}
    samples = Samples(y, mask, share, torch.zeros_like(y), source, allowed if masked else None, extras)

    expected = 0.0
    ours = [i for i in range(count) if mask[i] and source[i] < 2]
    g = [1 - sigmoid(float(logits[i, y[i]])) for i in range(count)]
    for i in ours:
        inside = [o for o in range(outputs) if not masked or allowed[i, o]]
        truth = [float(o == y[i]) for o in range(outputs)]
        peers = [j for j in ours if group[j] == group[i]]
        factor = g[i] / (sum(g[j] for j in peers) / len(peers)) if learned else 1.0
        loss = factor * bce(logits[i].tolist(), truth, inside)
        if distils:
            target = [float(old[i, o]) if o < 2 else truth[o] for o in range(outputs)]
            loss = 0.5 * loss + 0.5 * bce(logits[i].tolist(), target, inside)
        expected += float(share[i]) * loss
    assert float(method.sample_loss(logits, samples)) == pytest.approx(expected, rel=1e-12)
    kept = method.sample_weights(share, logits, samples)
    assert torch.equal(kept, torch.where(source < 2, 0.0, share))


def test_compensation_brings_both_groups_to_one_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 6, generator=generator, dtype=torch.float64)
    y, ours = torch.arange(40) % 6, torch.arange(40) < 33
    factors = compensation(logits, y, ours, torch.where(y < 3, 2, 1))
    for members in (ours & (y < 3), ours & (y >= 3)):
        assert float(factors[members].mean()) == pytest.approx(1.0, rel=1e-12)
    assert torch.equal(factors[~ours], torch.ones(7, dtype=torch.float64))


class Watch(Method):
    """Records every step's batch as the methods before have left it."""

    def __init__(self) -> None:
        self.steps: list[tuple[Cohort, int, tuple[int, ...], CohortBatch]] = []

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.steps.append((cohort, cohort.round, cohort.clients, batch))
        return batch


class Chosen(GLFC):
    """Records the old model, signal, learned classes and exemplars of each client by round."""

    def start_clients(self, cohort: Cohort) -> None:
        super().start_clients(cohort)
        if not hasattr(self, "given"):
            self.given: dict[tuple[int, int], Any] = {}
            self.signalled: dict[tuple[int, int], bool] = {}
            self.learned: dict[tuple[int, int], Tensor] = {}
            self.held: dict[tuple[int, int], int] = {}
            self.places: dict[tuple[int, int], Tensor] = {}
        for row, client in enumerate(cohort.clients):
            key = (cohort.round, client)
            self.given[key], self.signalled[key] = copy.deepcopy(self._old[row]), self._signals[row]
            self.learned[key] = self._table["learned"][row].clone()
            self.places[key] = self._table["place"][row][self._table["place"][row] >= 0].clone()
            self.held[key] = len(self.places[key])


@pytest.mark.parametrize("batchnorm", ["average", "drop"])
def test_targets_are_the_old_models_outputs(batchnorm: str) -> None:
    """For own and remembered samples, and for the classes it knows. With ``drop``, batch statistics are per client."""
    method, watch, data = Chosen(threshold=0.0, **QUICK), Watch(), data_of(3)  # type: ignore[arg-type]
    run(method, data, norm_net, {"watch": watch}, federated={"batchnorm": batchnorm})
    network = double(norm_net)(data.input_shape, data.num_outputs)
    with_old = remembered = 0
    for _, number, clients, batch in watch.steps:
        for row, client in enumerate(clients):
            mask, key = batch.mask[row], (number, client)
            if not mask.any():
                continue
            parts = [(batch.x[row][mask], batch.y[row][mask], {n: v[row][mask] for n, v in batch.extras.items()})]
            for added in batch.added:
                kept = added.mask[row]
                parts.append(
                    (added.x[row][kept], added.y[row][kept], {n: v[row][kept] for n, v in added.extras.items()})
                )
                share = method.held[key] / len(data.indices[data.rounds.task_of(number)][client])
                assert int(kept.sum()) == min(math.ceil(share * int(mask.sum()) - 1e-6), method.held[key])
            old, learned = method.given[key], method.learned[key]
            for part, (x, y, extras) in enumerate(parts):
                if not len(x):
                    continue
                remembered += part
                assert torch.equal(extras["glfc group"] == 2, learned[y])
                assert bool((extras["glfc group"] > 0).all()) == bool(learned.any())
                assert bool((extras["glfc old"] >= 0).any()) == (old is not None)
                if old is None:
                    continue
                with_old += 1
                network.load_state_dict(old.tensors, strict=False)
                network.train(batchnorm == "drop")
                if batchnorm == "drop" and len(x) < 2:
                    continue  # torch's BatchNorm refuses them
                with torch.no_grad():
                    expected = torch.where(old.classes, 1 / (1 + (-network(x)).exp()), -1.0)
                torch.testing.assert_close(extras["glfc old"].double(), expected, rtol=1e-9, atol=1e-10)
    assert with_old > 20
    assert remembered > 20


# The proxy server.


def named(name: str) -> dict[str, Tensor]:
    return {name: torch.zeros(1)}


def test_slots_move_on_with_new_classes() -> None:
    proxy, scores = ProxyServer(6), {"a": 0.5, "b": 0.7, "c": 0.6, "d": 0.2, "e": 0.2, "f": 0.1}

    def judge(name: str, changed: bool = False) -> str | None:
        proxy.judge(named(name), lambda tensors: scores[next(iter(tensors))], changed)
        return None if proxy.current is None else next(iter(proxy.current.tensors))

    def images(*labels: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(labels), 1, 2, 2), torch.tensor(labels)

    def old(signals: bool, *classes: int) -> str | None:
        flags = torch.zeros(6, dtype=torch.bool)
        flags[list(classes)] = True
        kept = proxy.old_model(signals, flags)
        return None if kept is None else next(iter(kept.tensors))

    assert judge("a") is None  # no image yet
    assert proxy.receive(*images(0, 0, 1))
    assert [judge("a"), judge("b"), judge("c")] == ["a", "b", "b"]
    assert old(True, 0, 1) is None
    assert old(True, 2, 3) == "b"
    assert old(False, 2, 3) is None
    assert not proxy.receive(*images(0, 2))  # a straggler, half of its classes known
    assert proxy.labels.tolist() == [0, 0, 1, 0, 2]
    scores["b"] = 0.55
    assert judge("c", changed=True) == "c"
    assert proxy.current is not None
    assert proxy.current.classes.tolist() == [True, True, True, False, False, False]
    assert proxy.receive(*images(3, 4, 1))
    assert proxy.labels.tolist() == [3, 4, 1]
    assert [judge("d"), judge("e"), judge("f")] == ["d", "e", "e"]  # a worse model does not replace it
    assert old(True, 3, 4) == "c"  # the current model already knows these classes
    assert old(False, 3, 4) == "c"
    assert old(True, 5) == "e"
    again = ProxyServer(6)
    again.load_state_dict(copy.deepcopy(proxy.state_dict()))
    for signals, classes in ((True, (5,)), (False, (5,))):
        flags = torch.zeros(6, dtype=torch.bool)
        flags[list(classes)] = True
        one, other = proxy.old_model(signals, flags), again.old_model(signals, flags)
        assert one is not None
        assert other is not None
        assert (one.version, one.accuracy) == (other.version, other.accuracy)


def test_a_task_without_a_model_of_its_own_leaves_the_previous_one() -> None:
    proxy = ProxyServer(3)
    for label in range(3):  # the images of every task shift the slots, and none comes after the first task's model
        assert proxy.receive(torch.zeros(1, 1, 2, 2), torch.tensor([label]))
        if label == 0:
            proxy.judge(named("a"), lambda tensors: 0.5)
    kept = proxy.old_model(True, torch.tensor([False, False, True]))
    assert kept is not None
    assert list(kept.tensors) == ["a"]


class Judged(GLFC):
    """Records the accuracy that the proxy server finds for every model."""

    def _accuracy(self, tensors: Mapping[str, Tensor]) -> float:
        found = super()._accuracy(tensors)
        assert self.proxy.images is not None
        held = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        seen = self.proxy.classes.clone()
        self.found.append((held, self.proxy.images.clone(), self.proxy.labels.clone(), seen, found))
        return found

    found: list[tuple[dict[str, Tensor], Tensor, Tensor, Tensor, float]]


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
def test_models_are_judged_as_they_are_tested(batchnorm: str) -> None:
    """BatchNorm uses the statistics that were sent or, if none are sent, those of the proxy server's images.

    Only classes with images compete, because outputs that are not trained yet could win.
    """
    method, data = Judged(**{**QUICK, "images": 5}), data_of()  # type: ignore[arg-type]
    method.found = []
    run(method, data, norm_net, federated={"batchnorm": batchnorm})
    assert len(method.found) >= 9
    differs = 0
    for tensors, images, labels, seen, found in method.found:
        network = double(norm_net)(data.input_shape, data.num_outputs)
        network.load_state_dict(tensors, strict=False)
        accuracies = []
        for trains in (batchnorm != "average", batchnorm == "average"):
            with torch.no_grad():
                logits = network.train(trains)(images)
                chosen = seen.nonzero().squeeze(1)[logits[:, seen].argmax(1)]
                accuracies.append(float((chosen == labels).double().mean()))
        assert found == pytest.approx(accuracies[0])
        differs += accuracies[0] != accuracies[1]
    assert differs


class Prototypes(GLFC):
    """Records the prototypes that clients send."""

    sent: list[tuple[dict[str, Tensor], int, int, Tensor, Tensor]]

    def _prototypes(self, model: Mapping[str, Tensor], cohort: Cohort, client: int) -> tuple[Tensor, Tensor]:
        images, labels = super()._prototypes(model, cohort, client)
        held = {name: tensor.clone() for name, tensor in model.items()}
        self.sent.append((held, unwrap_task(cohort.task), client, images.clone(), labels))
        return images, labels


def test_prototypes_are_the_middle_of_their_class_and_reach_the_server() -> None:
    """Prototypes are perturbed as by hand, and the server recovers them from the gradients."""
    method = Prototypes(12, None, 1.2, perturbation_steps=3, inversion_steps=25, images=2)
    method.sent = []
    federation = run(method, data_of(2), mlp)
    data = federation.data
    first = [entry for entry in method.sent if entry[1] == 0]
    assert len(first) >= 3
    for model, task, client, images, labels in method.sent:
        network: Any = plain_network(data, double(mlp), model).eval()
        samples = data.tasks[task]
        known_by = data.handles.of(
            data.client_global_index(task, client)
        )  # a client's samples are in the order of handles
        own = data.indices[task][client][known_by.argsort()]
        x = samples.transform(samples.train.images[own])
        y = samples.train.labels[own] + data.outputs.offsets[task]
        assert labels.tolist() == sorted(set(y.tolist()))
        for image, label in zip(images, labels.tolist(), strict=True):
            members = x[y == label]
            with torch.no_grad():
                features = network.features(members.double())
            features = features / features.norm(dim=1, keepdim=True)
            distances = (features - features.mean(0)).square().sum(1)
            first = int((distances <= distances.min() + 1e-12).nonzero()[0])  # two samples are equally far
            by_hand = members[first].double()
            for _ in range(3):
                by_hand = by_hand.detach().requires_grad_()
                p = torch.sigmoid(network(by_hand[None])[0])
                loss = -(p[label].log() + sum((1 - p[o]).log() for o in range(6) if o != label)) / 6
                (gradient,) = torch.autograd.grad(loss, by_hand)
                by_hand = by_hand - 0.2 * (gradient + 1e-5 * by_hand)
            torch.testing.assert_close(image.double(), by_hand.detach(), rtol=0, atol=1e-5)
    assert method.proxy.images is not None
    expected = [
        (label, image) for *_, images, labels in method.sent for image, label in zip(images, labels, strict=True)
    ]
    for number in range(len(method.proxy.labels)):
        found, label = method.proxy.images[number], method.proxy.labels[number]
        near = [float((found - image).square().mean()) for same, image in expected if same == label]
        assert min(near) < 1e-3
    encoder = GradientEncoder((1, 4, 4), 6, torch_generator(0, "glfc encoder"))
    size = 4 * sum(p.numel() for p in encoder.parameters())
    assert federation.channel.uplink_bytes["glfc prototypes"] == size * len(expected)


def test_old_models_go_down_when_they_are_new_to_a_client() -> None:
    method = Chosen(threshold=0.2, **QUICK)  # type: ignore[arg-type]
    federation = run(method)
    has: dict[int, int] = {}
    sent = 0
    for (_, client), old in sorted(method.given.items()):
        if old is not None and has.get(client) != old.version:
            has[client] = old.version
            sent += 1
    assert sent > 3
    size = sum(t.numel() * 8 for t in federation.model.shared_tensors().values())
    assert federation.channel.downlink_bytes["glfc old model"] == sent * size


def test_personal_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="one model for all clients"):
        run(GLFC(**QUICK), others={"own": PersonalLayers(["head.*"])})  # type: ignore[arg-type]


def test_who_trains_to_nan_has_noticed_nothing() -> None:
    """A client skipped in the first round of the second task keeps nothing of it and notices the data a round later."""

    class Notes(GLFC):
        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            super().finish_clients(cohort, positions)
            signals.update((cohort.round, cohort.clients[p]) for p in positions if self._signals[p])

        def end_round(self, plan: RoundPlan) -> None:
            super().end_round(plan)
            found = self.context.clients.get(self.name, 1)
            assert found is not None
            kept.append({name: values.clone() for name, values in found.items()})

    signals: set[tuple[int, int]] = set()
    kept: list[dict[str, Tensor]] = []
    data = tiny_data(split(2), num_clients=3, scenario="class", schedule={"rounds_per_task": 2})
    method = Notes(**QUICK)  # type: ignore[arg-type]
    method.threshold = -100.0  # signals in every round
    client = tiny_client(data, double(wide_mlp), sgd, {"glfc": method, "poison": Poison(1, 2)})
    federation = fit(client, data, {"on_bad_update": "skip"})
    assert federation.channel.skipped == [(2, 1, 1)]
    assert signals == {(r, c) for r in range(4) for c in range(3)} - {(2, 1)}
    assert all(torch.equal(values, kept[2][name]) for name, values in kept[1].items())
    assert (kept[2]["before"] == -1).all()
    assert (kept[2]["place"] == -1).all()
    assert torch.equal(kept[3]["before"], kept[1]["last"])
    of = data.global_index.tasks(data.handles.global_index(kept[3]["place"][kept[3]["place"] >= 0]))
    assert len(of) > 5
    assert not of.any()


def test_a_method_that_moves_the_model_afterwards_has_to_stand_before_it() -> None:
    """The proxy server judges the global model at the end of the round, and keeps it if it is the best so far."""
    moving = CFeD(Synthetic(6, [1, 4, 4], 60, 10), server_distillation=1, share=0.0)
    with pytest.raises(ConfigError, match=r"methods = \['glfc', 'cfed'\] .*glfc behind cfed"):
        run(GLFC(), others={"cfed": moving})
