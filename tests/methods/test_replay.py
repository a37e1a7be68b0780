"""ER and GLFC's gradient compensation, against a loop that writes every client's steps out in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.naive_augmentation import augmented
from support.naive_replay import replay_client, replay_data
from support.tiny import (
    Rounds,
    at_round,
    double,
    fit,
    mlp,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor
from torch.func import functional_call

from cfl.data.augmentation import CropFlip
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.engines.recorded import RecordedSteps
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import DER, ER, GradientCompensation, Method
from cfl.models import MLP
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ENGINES = [EngineOptions("vmap"), EngineOptions("workers", workers=2)]


def memories(federation: Federation, topic: str) -> dict[int, list[tuple[int, int]]]:
    """Client -> (task, index) of what it remembers, as the federation holds it."""
    found = {}
    for client in federation.clients.holders(topic):
        table = federation.clients.get(topic, client)
        assert table is not None
        pairs = zip(table["task"].tolist(), table["index"].tolist(), strict=True)
        found[client] = [pair for pair in pairs if pair[1] >= 0]
    return found


class Loop:
    """Rounds, clients and steps one after another; only data, orders and the memories are taken from the run."""

    def __init__(self, client: Client, data: FederatedDataModule, remembered: Mapping[int, list[tuple[int, int]]]):
        self.network, self.data, self.remembered = client.network, data, remembered
        self.model = {n: t.detach().clone() for n, t in client.network.state_dict().items()}

    def run(self, loss: Any) -> dict[str, Tensor]:
        for number in range(self.data.num_rounds):
            plan = self.data.rounds.round(number)
            trained = [self.local(plan, client, loss) for client in plan.clients]
            self.model = {n: torch.stack([t[n] for t in trained]).mean(0) for n in self.model}
        return self.model

    def local(self, plan: RoundPlan, client: int, loss: Any) -> dict[str, Tensor]:
        model = {n: t.clone().requires_grad_() for n, t in self.model.items()}
        at_round(self.data, plan.round)
        for batch in self.data.train_dataloader():
            if client not in batch.clients:
                continue
            row = batch.clients.index(client)
            index = batch.index[row][batch.mask[row]]
            if not len(index):
                continue
            self.moment = (plan.round, batch.step)
            x, y = self.data.gather(plan.task, index, self.moment)
            memory = [pair for pair in self.remembered.get(client, []) if pair[0] < plan.task]
            own = self.masked(functional_call(self.network, model, (x,)), [plan.task] * len(y))
            old_y = old = None
            if memory:
                old_x, old_y = (torch.cat(p) for p in zip(*(self.sample(*pair) for pair in memory), strict=True))
                old = self.masked(functional_call(self.network, model, (old_x,)), [task for task, _ in memory])
            count = len(self.data.indices[plan.task][client])
            gradients = torch.autograd.grad(loss(own, y, old, old_y, count), list(model.values()))
            with torch.no_grad():
                for tensor, gradient in zip(model.values(), gradients, strict=True):
                    tensor -= 0.1 * gradient
        return {n: t.detach() for n, t in model.items()}

    def sample(self, task: int, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data.gather(task, torch.tensor([index]))
        return (x if self.data.augmentation is None else augmented(self.data, task, index, *self.moment)[None]), y

    def masked(self, logits: Tensor, tasks: list[int]) -> Tensor:
        allowed = self.data.outputs.train
        return logits if allowed is None else logits.masked_fill(~allowed[torch.tensor(tasks)], -torch.inf)


def equal(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    new = F.cross_entropy(own, y)
    return new if old is None or old_y is None else new + 0.7 * F.cross_entropy(old, old_y)


def mean(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    new = F.cross_entropy(own, y)
    return new if old is None or old_y is None else (new + 0.7 * F.cross_entropy(old, old_y)) / 1.7


def counted(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    if old is None or old_y is None:
        return F.cross_entropy(own, y)
    total = F.cross_entropy(own, y, reduction="sum") + 0.7 * F.cross_entropy(old, old_y, reduction="sum")
    return total / (len(y) + len(old_y))


def appended(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    """Every sample of training set and memory counts once per epoch, in expectation over batches."""
    if old is None or old_y is None:
        return F.cross_entropy(own, y)
    new, kept = F.cross_entropy(own, y), F.cross_entropy(old, old_y, reduction="sum")
    return (count * new + 0.7 * kept) / (count + len(old_y))


def compensated(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    if old is None or old_y is None:
        return F.cross_entropy(own, y)
    total = own.new_zeros(())
    for logits, labels in ((own, y), (old, old_y)):
        g = torch.stack([(row.softmax(0)[label] - 1).abs() for row, label in zip(logits, labels, strict=True)]).detach()
        for row, label, size in zip(logits, labels, g, strict=True):
            total = total + size / g.mean() * -row.log_softmax(0)[label]
    return total / (len(y) + len(old_y))


def compensated_and_appended(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    if old is None or old_y is None:
        return F.cross_entropy(own, y)
    sums = []
    for logits, labels in ((own, y), (old, old_y)):
        g = (logits.softmax(1)[range(len(labels)), labels] - 1).abs().detach()
        sums.append((g / g.mean() * F.cross_entropy(logits, labels, reduction="none")).sum())
    return (count * sums[0] / len(y) + sums[1]) / (count + len(old_y))


def binary(own: Tensor, y: Tensor, old: Tensor | None, old_y: Tensor | None, count: int) -> Tensor:
    groups = [(own, y)] + ([] if old is None or old_y is None else [(old, old_y)])
    total, count = own.new_zeros(()), sum(len(labels) for _, labels in groups)
    for logits, labels in groups:
        g = torch.stack([1 - row[label].sigmoid() for row, label in zip(logits, labels, strict=True)]).detach()
        for row, label, size in zip(logits, labels, g, strict=True):
            seen = row.isfinite()
            target = torch.zeros_like(row)
            target[label] = 1.0
            factor = size / g.mean() if len(groups) > 1 else 1.0
            total = total + factor * F.binary_cross_entropy_with_logits(row[seen], target[seen])
    return total / count


CASES: dict[str, tuple[Callable[[], Method], Any]] = {
    "equal": (partial(ER, size=2, weight=0.7), equal),
    "mean": (partial(ER, size=2, weight=0.7, weighting="mean"), mean),
    "count": (partial(ER, size=2, weight=0.7, weighting="count"), counted),
    "appended": (partial(ER, size=2, weight=0.7, weighting="appended"), appended),
    "compensated": (partial(GradientCompensation, size=2, weighting="count"), compensated),
    "compensated, appended": (partial(GradientCompensation, size=2), compensated_and_appended),
    "binary": (partial(GradientCompensation, "bce", size=2, weighting="count"), binary),
}


@pytest.mark.parametrize("engine", ENGINES, ids=["vmap", "workers"])
@pytest.mark.parametrize("scenario", ["domain", "task"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_what_the_equations_say(name: str, scenario: str, engine: EngineOptions) -> None:
    check_run(name, scenario, engine, 2)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_replayed_samples_are_augmented_anew_in_every_step(name: str, width: int) -> None:
    check_run(name, "domain", ENGINES[0], width, CropFlip(1))


def check_run(
    name: str, scenario: str, engine: EngineOptions, width: int, augmentation: CropFlip | None = None
) -> None:
    method, loss = CASES[name]
    stream = permuted(3) if scenario == "domain" else split(3, classes=6)
    schedule = {"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": width}
    data = tiny_data(stream, schedule=schedule, augmentation=augmentation)
    client = tiny_client(data, double(mlp), sgd, {"replay": method()}, engine)
    start = {n: t.clone() for n, t in client.network.state_dict().items()}
    federation = fit(client, data)
    remembered = memories(federation, "replay memory")
    source = "glfc" if isinstance(federation.methods["replay"], GradientCompensation) else "er"
    for number, pairs in remembered.items():  # two of each task but the last, of the client's own, drawn at random
        orders = [
            numpy_generator(data.seed, f"{source} choice", task, number).permutation(data.indices[task][number])
            for task in (0, 1)
        ]
        assert pairs == [(task, int(index)) for task, order in enumerate(orders) for index in order[:2]]
    assert len(remembered) == data.num_clients
    loop = Loop(client, data, remembered)
    loop.model = start
    expected = loop.run(loss)
    torch.testing.assert_close(weights(federation), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES, ids=["vmap", "workers"])
@pytest.mark.parametrize("name", ["equal", "mean", "count", "appended"])
def test_clients_without_a_memory_and_with_partial_batches_are_weighted_likewise(
    name: str, engine: EngineOptions
) -> None:
    """Side by side with others: clients that join later have no memory, poor ones less than one of the full size."""
    _, loss = CASES[name]
    joining = Joining(3, 1)
    data = replay_data(permuted(3), participation=joining, schedule={"cohort_width": 3, "clients_per_round": 3})
    er = ER(size=5, weight=0.7, weighting=name)  # type: ignore[arg-type]
    client = tiny_client(data, double(mlp), sgd, {"replay": er}, engine)
    start = {n: t.clone() for n, t in client.network.state_dict().items()}
    federation = fit(client, data)
    remembered = memories(federation, "replay memory")
    plans = [data.rounds.round(number) for number in range(data.num_rounds)]
    sizes = [[sum(task < plan.task for task, _ in remembered.get(c, [])) for c in plan.clients] for plan in plans[2:]]
    assert any(min(of) == 0 < max(of) for of in sizes)
    assert any(size % 5 > 0 for of in sizes for size in of)
    loop = Loop(client, data, remembered)
    loop.model = start
    torch.testing.assert_close(weights(federation), loop.run(loss), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 3])
def test_a_memory_for_the_whole_run_is_a_uniform_sample_of_all_ended_tasks(size: int) -> None:
    data = tiny_data(permuted(4, train=960), num_clients=120, schedule={"rounds_per_task": 1, "clients_per_round": 2})
    federation = fit(tiny_client(data, mlp, sgd, {"er": ER(size=size, per_task=False)}), data)
    remembered = memories(federation, "er memory")
    assert len(remembered) == 120
    for client, pairs in remembered.items():
        assert len(set(pairs)) == size
        assert all(index in data.indices[task][client] for task, index in pairs)
    counts = torch.bincount(torch.tensor([task for pairs in remembered.values() for task, _ in pairs]), minlength=4)
    assert counts[3] == 0  # the last task is never replayed
    assert float(((counts[:3] - 40.0 * size) ** 2 / (40.0 * size)).sum()) < 9.21  # 1 % of chi-square, 2 degrees


TWO_LOTS: dict[str, Callable[[], dict[str, Method]]] = {
    "der++": lambda: {"der": DER(alpha=0.5, beta=0.5, batch_size=30)},
    "er, der": lambda: {"er": ER(size=20), "der": DER(alpha=0.5, batch_size=8)},
}


@pytest.mark.parametrize("name", TWO_LOTS)
def test_dropout_of_two_lots_does_not_depend_on_the_cohort(name: str) -> None:
    """Clients hold unequally many samples, so that one lot is padded before the next begins."""
    results = []
    for engine, width in ((ENGINES[0], 1), (ENGINES[0], 5), (ENGINES[1], 3), (ENGINES[1], 5)):
        data = replay_data(schedule={"cohort_width": width, "clients_per_round": 5})
        network = double(partial(MLP, hidden=[8], dropout=0.5))
        results.append(weights(fit(replay_client(data, TWO_LOTS[name](), network, ReplayBuffer(30), engine), data)))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=1e-12)


def test_dropout_of_own_samples_does_not_depend_on_the_memory() -> None:
    """All samples have masks. A memory of weight 1e-12 changes only rounding, a memory of weight 1 the model."""
    network = double(partial(MLP, hidden=[8], dropout=0.5))
    found = []
    for engine in ENGINES:
        for weight in (1e-12, 1.0):
            data = tiny_data(permuted(2, train=70), schedule={"cohort_width": 3})
            federation = fit(tiny_client(data, network, sgd, {"er": ER(size=3, weight=weight)}, engine), data)
            found.append(weights(federation))
    data = tiny_data(permuted(2, train=70), schedule={"cohort_width": 3})
    plain = weights(fit(tiny_client(data, network), data))
    for name, tensor in plain.items():
        torch.testing.assert_close(found[0][name], tensor, rtol=0, atol=1e-9)
        torch.testing.assert_close(found[0][name], found[2][name], rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1][name], found[3][name], rtol=0, atol=1e-9)
    assert max(float((found[1][n] - plain[n]).abs().max()) for n in plain) > 1e-3


@pytest.mark.parametrize("scenario", ["domain", "task"])
@pytest.mark.parametrize("optimizer", [sgd, partial(torch.optim.SGD, lr=0.1, momentum=0.5)], ids=["plain", "momentum"])
def test_recorded_steps_give_the_same_bits(scenario: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = [], []
    record = RecordedSteps._record
    monkeypatch.setattr(RecordedSteps, "_record", lambda self, *given: made.append(given) or record(self, *given))
    for least in (2, 10**9):
        monkeypatch.setattr("cfl.engines.recorded.WORTH_RECORDING", least)
        data = tiny_data(permuted(2, train=70) if scenario == "domain" else split(2, train=70))
        network = partial(MLP, hidden=[8], dropout=0.5)
        client = tiny_client(data, network, optimizer, {"er": ER(size=3)}, EngineOptions("workers", 2, 1))
        found.append(weights(fit(client, data)))
        assert any(given[3] is not None for given in made) == (least == 2)  # with samples' weights
        made.clear()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_heads_that_no_client_replays_stay_as_they_were() -> None:
    """Weight decay moves the heads of tasks that are replayed, and no other."""
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    data = tiny_data(split(3, classes=6), schedule={"rounds_per_task": 1})
    watch = Rounds()
    fit(tiny_client(data, mlp, decaying, {"er": ER()}), data, None, [watch])
    before, after = (model["head.weight"] for model in watch.models[1:3])
    assert not torch.equal(before[:4], after[:4])
    first, second = (model["head.weight"] for model in watch.models[:2])
    assert torch.equal(first[4:], second[4:])
    assert not torch.equal(first[:2], second[:2])


@pytest.mark.parametrize("exposure", ["cumulative", "joint"])
def test_where_old_samples_are_trained_on_anyway_there_is_no_memory(exposure: str) -> None:
    data = tiny_data(permuted(2, train=70), exposure=exposure)
    with pytest.raises(ConfigError, match=rf"data\.exposure = '{exposure}'.*replay memory"):
        fit(tiny_client(data, mlp, sgd, {"er": ER(1)}), data)


def test_two_methods_that_draw_the_same_samples_are_refused() -> None:
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    fit(tiny_client(data, mlp, sgd, {"er": ER(2), "compensation": GradientCompensation(size=2)}), data)
    for twins in ({"er": ER(2), "more": ER(3)}, {"a": GradientCompensation(size=2), "b": GradientCompensation(size=3)}):
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
        with pytest.raises(ConfigError, match=f"methods = {re.escape(str(list(twins)))}.*would draw the same samples"):
            fit(tiny_client(data, mlp, sgd, dict[str, Method](twins)), data)
