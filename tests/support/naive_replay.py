"""Replay written plainly: a list per client as its buffer, one ordinary network, flat gradients, autograd.

Nothing of the engine is used except the data, the sampled clients and the documented keys of the draws. The hash of
the keys is written out here again, in Python's integers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.data.augmentation import augmentation_words
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import Method
from cfl.methods.components.gradient_projection import Refinement
from cfl.randomness.generators import numpy_generator, seed_for
from cfl.training.client import Client
from support.naive import plain_network
from support.tiny import UNBALANCED, NetworkFactory, double, fit, mlp, sgd, split, tiny_client, tiny_data, weights

LR = 0.1


def replay_client(
    data: FederatedDataModule,
    methods: dict[str, Method],
    network: NetworkFactory,
    buffer: ReplayBuffer | None = None,
    engine: EngineOptions | None = None,
    optimizer: Any = sgd,
) -> Client:
    """Return a client whose buffers have the settings of ``buffer``; other arguments as for ``tiny_client``."""
    client = tiny_client(data, network, optimizer, methods, engine)
    client.buffer = ReplayBuffer() if buffer is None else buffer
    return client


def word(key: int, place: int) -> int:
    """63 random bits: SplitMix64 with its sign bit taken away."""
    return whole_word(key, place) % 2**63


def whole_word(key: int, place: int) -> int:
    """64 random bits: SplitMix64."""
    size = 2**64
    bits = (key + (place + 1) * 0x9E3779B97F4A7C15) % size
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits = (bits ^ (bits >> shift)) * factor % size
    return bits


@dataclass
class Slot:
    """A sample in a buffer: its task and index, where it was trained on (round, step, row), and its logits."""

    task: int
    index: int
    round: int = 0
    step: int = 0
    row: int = 0
    logits: Tensor | None = None


AFTER_THE_ROUND = -1
"""Number that stands for the moment after a round's local steps, which count from 0."""


@dataclass
class Buffer:
    """The buffer of one client."""

    client: int
    seed: int
    size: int
    rule: str = "reservoir"
    once: bool = True
    slots: list[Slot] = field(default_factory=list)
    known: set[tuple[int, int]] = field(default_factory=set)
    offered: int = 0

    def offer(self, sample: Slot) -> None:
        """Offer one sample to the buffer, which takes it or not by its rule."""
        if self.once and (sample.task, sample.index) in self.known:
            return
        self.known.add((sample.task, sample.index))
        number, self.offered = self.offered, self.offered + 1
        if len(self.slots) < self.size:
            self.slots.append(sample)
            return
        bits = word(seed_for(self.seed, "buffer rule", self.client), number)
        slot = {
            "reservoir": bits % (number + 1),
            "sliding_window": number % self.size,
            "random_replacement": bits % self.size,
        }[self.rule]
        if slot < self.size:
            self.slots[slot] = sample

    def draw(self, count: int, purpose: str, *moment: int) -> list[Slot]:
        """Draw samples: those whose slots have the smallest random words."""
        key = seed_for(self.seed, f"buffer {purpose}", self.client, *moment)
        order = sorted(range(len(self.slots)), key=lambda slot: word(key, slot))
        return [self.slots[slot] for slot in order[:count]]


def local_samples(data: FederatedDataModule, plan: RoundPlan, client: int) -> Iterator[tuple[int, list[Slot]]]:
    """The steps of a client in a round, with the samples it trains on."""
    own, size, step = data.trained_on(plan.task)[client], data.schedule.batch_size, 0
    for epoch in range(data.schedule.local_epochs):
        order = own[numpy_generator(data.seed, "shuffle", plan.round, client, epoch).permutation(len(own))]
        for start in range(0, len(own), size):
            samples = []
            for row, place in enumerate(order[start : start + size].tolist()):
                task, index = plan.task, place
                if data.exposure != "sequential":
                    task = 0
                    while index >= len(data.tasks[task].train):
                        index -= len(data.tasks[task].train)
                        task += 1
                samples.append(Slot(task, index, plan.round, step, row))
            yield step, samples
            step += 1


def filled_buffers(data: FederatedDataModule, size: int, rule: str = "reservoir", once: bool = True) -> list[Buffer]:
    """What every client's buffer holds when all rounds are over."""
    buffers = [Buffer(client, data.seed, size, rule, once) for client in range(data.num_clients)]
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for client in plan.clients:
            for _, samples in local_samples(data, plan, client):
                for sample in samples:
                    buffers[client].offer(sample)
    return buffers


def held(federation: Federation, client: int) -> list[tuple[int, int]]:
    """Task and index of what a client of a run holds, slot by slot."""
    table = federation.clients.get("buffer", client)
    if table is None:
        return []
    tasks, index = federation.data.global_index.split(table["place"][table["place"] >= 0])
    return list(zip(tasks.tolist(), index.tolist(), strict=True))


def inputs(data: FederatedDataModule, samples: Sequence[Slot]) -> tuple[Tensor, Tensor, list[int]]:
    """Images, augmented as in the step in which they were put in; outputs; tasks."""
    images, labels = [], []
    for sample in samples:
        task = data.tasks[sample.task]
        image = task.train.images[[sample.index]]
        if data.augmentation is not None:
            place = torch.tensor([sample.index])
            words = augmentation_words(data.seed, sample.round, sample.step, sample.task, place)
            image = data.augmentation(image, words)
        images.append(task.transform(image))
        first = 0 if data.scenario == "domain" else sum(data.stream.classes_per_task[: sample.task])
        labels.append(int(task.train.labels[sample.index]) + first)
    return torch.cat(images), torch.tensor(labels), [sample.task for sample in samples]


def outputs_of(data: FederatedDataModule, task: int, now: int) -> list[int]:
    """Outputs in the loss of a task's samples in steps of task ``now``."""
    sizes = data.stream.classes_per_task
    if data.scenario == "domain":
        return list(range(data.num_outputs))
    if data.scenario == "task":
        return list(range(sum(sizes[:task]), sum(sizes[: task + 1])))
    return list(range(sum(sizes[: max(task, now) + 1]) if data.class_loss == "seen" else sum(sizes)))


def mean_cross_entropy(data: FederatedDataModule, logits: Tensor, y: Tensor, tasks: Sequence[int], now: int) -> Tensor:
    """Mean cross-entropy; each sample's is over the outputs that take part in its loss."""
    losses = []
    for row, label, task in zip(logits, y.tolist(), tasks, strict=True):
        allowed = outputs_of(data, task, now)
        losses.append(F.cross_entropy(row[allowed], torch.tensor(allowed.index(label))))
    return torch.stack(losses).mean()


def mean_squares(
    data: FederatedDataModule, logits: Tensor, samples: Sequence[Slot], now: int, over: str = "mean"
) -> Tensor:
    """DER's loss term: the mean over samples of the squared differences' mean over outputs, or of their sum."""
    means = []
    for row, sample in zip(logits, samples, strict=True):
        assert sample.logits is not None
        allowed = outputs_of(data, sample.task, now)
        squares = (row - sample.logits)[allowed].square()
        means.append(squares.mean() if over == "mean" else squares.sum())
    return torch.stack(means).mean()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def project(g: Tensor, r: Tensor) -> Tensor:
    return g - (g @ r) / (r @ r) * r


def project_and_scale(g: Tensor, r: Tensor) -> Tensor:
    p = project(g, r)
    return g.norm() / p.norm() * p


def rotate(g: Tensor, r: Tensor) -> Tensor:
    return g.norm() * (g + r) / (g + r).norm()


def average(g: Tensor, r: Tensor) -> Tensor:
    return (g + r) / 2


FORMULAS: dict[Refinement, Callable[[Tensor, Tensor], Tensor]] = {
    "project": project,
    "project_and_scale": project_and_scale,
    "rotate": rotate,
    "average": average,
}
"""Refinements of a flat gradient by a flat reference."""


def projected(g: Tensor, r: Tensor) -> Tensor:
    """Return ``g`` without its part against ``r`` (equation 5)."""
    return project(g, r) if g @ r < 0 else g


@dataclass
class Settings:
    """Options of the methods. ``agem``, ``der`` and ``fed`` are numbers of drawn samples; None leaves a method out."""

    agem: int | None = None
    der: int | None = None
    alpha: float = 1.0
    beta: float = 0.0
    over: str = "mean"
    fed: int | None = None
    every: int = 1
    asked: Literal["sampled", "all", "holders"] = "sampled"
    refinement: Callable[[Tensor, Tensor], Tensor] = projected
    share: float = 1.0


class Training:
    """Federated training with replay.

    Args:
        data: tasks, clients, schedule.
        make: makes the network, in float64.
        state: the network's initial values.
        settings: the methods.
        size: size of each buffer.

    Attributes:
        state: the global model.
        reference: Fed-A-GEM's reference gradient, flat.
        references: one entry per computed reference: client -> its own gradient.
        steps: number of gradients that were compared with Fed-A-GEM's reference.
        refined: number of gradients that it changed.
        spared: number of gradients that it would have changed if their steps had been drawn.
        changed: number of steps that differ from those without the methods.
    """

    def __init__(
        self, data: FederatedDataModule, make: NetworkFactory, state: dict[str, Tensor], settings: Settings, size: int
    ) -> None:
        self.data, self.make, self.settings = data, make, settings
        self.state = copy.deepcopy(state)
        self.buffers = [Buffer(client, data.seed, size) for client in range(data.num_clients)]
        self.reference: Tensor | None = None
        self.references: list[dict[int, Tensor]] = []
        self.steps = self.refined = self.spared = self.changed = 0

    def run(self) -> dict[str, Tensor]:
        """Run all rounds; return the global model."""
        for number in range(self.data.num_rounds):
            plan = self.data.rounds.round(number)
            sent = [self.local(plan, client) for client in plan.clients]
            for name, before in self.state.items():
                mean = torch.stack([own[name].double() for own in sent]).mean(0)
                self.state[name] = mean.to(before.dtype) if before.is_floating_point() else mean.round().long()
            if self.settings.fed is not None and number + 1 < self.data.num_rounds:
                self.refer(plan)
        return self.state

    def local(self, plan: RoundPlan, client: int) -> dict[str, Tensor]:
        """Train one client for a round; return its model."""
        network = plain_network(self.data, self.make, self.state).train()
        parameters, buffer = list(network.parameters()), self.buffers[client]
        for step, samples in local_samples(self.data, plan, client):
            gradient, logits = self.gradient(network, buffer, plan, step, samples)
            with torch.no_grad():
                for tensor, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
                    tensor -= LR * part.view_as(tensor)
            for row, sample in enumerate(samples):
                sample.logits = logits[row].float().double()  # buffers hold single precision
                buffer.offer(sample)
        return network.state_dict()

    def gradient(
        self, network: nn.Module, buffer: Buffer, plan: RoundPlan, step: int, samples: list[Slot]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of a step after all methods, and the logits of the batch."""
        settings, data = self.settings, self.data
        of_buffer = None
        if settings.agem is not None:
            drawn = buffer.draw(settings.agem, "A-GEM", plan.round, step)
            of_buffer = self.on_samples(copy.deepcopy(network), drawn, plan.task) if drawn else None
        old, labelled = [], []
        if settings.der is not None and settings.alpha:
            old = buffer.draw(settings.der, "der logits", plan.round, step)
        if settings.der is not None and settings.beta:
            labelled = buffer.draw(settings.der, "der labels", plan.round, step)
        x, y, tasks = inputs(data, [*samples, *old, *labelled])
        logits = network(x)
        n, m = len(samples), len(samples) + len(old)
        loss = mean_cross_entropy(data, logits[:n], y[:n], tasks[:n], plan.task)
        if old:
            loss = loss + settings.alpha * mean_squares(data, logits[n:m], old, plan.task, settings.over)
        if labelled:
            loss = loss + settings.beta * mean_cross_entropy(data, logits[m:], y[m:], tasks[m:], plan.task)
        g = flat(torch.autograd.grad(loss, list(network.parameters())))
        before = g
        g = self.on_buffers(of_buffer)(g)
        key = seed_for(data.seed, "Fed-A-GEM share", plan.round, buffer.client)
        g = self.on_all_buffers(g, whole_word(key, step) / 2**64 < settings.share)
        self.changed += bool(old or labelled or not torch.equal(g, before))
        return g, logits[:n].detach()

    def on_buffers(self, of_buffer: Tensor | None) -> Callable[[Tensor], Tensor]:
        return lambda g: g if of_buffer is None else projected(g, of_buffer)

    def on_all_buffers(self, g: Tensor, drawn: bool) -> Tensor:
        if self.reference is None:
            return g
        changed = self.settings.refinement(g, self.reference)
        self.steps += 1
        if not drawn:
            self.spared += not torch.equal(changed, g)
            return g
        self.refined += not torch.equal(changed, g)
        return changed

    def on_samples(self, network: nn.Module, samples: Sequence[Slot], now: int) -> Tensor:
        """Gradient of the mean cross-entropy, flat."""
        x, y, tasks = inputs(self.data, samples)
        loss = mean_cross_entropy(self.data, network(x), y, tasks, now)
        return flat(torch.autograd.grad(loss, list(network.parameters())))

    def refer(self, plan: RoundPlan) -> None:
        """Compute Fed-A-GEM's reference for the next round at the new global model."""
        settings, found = self.settings, {}
        if (plan.round + 1) % settings.every:
            return
        assert settings.fed is not None
        present = self.data.members[plan.task].tolist()
        asked = {"sampled": plan.clients, "all": present, "holders": range(self.data.num_clients)}
        for client in asked[settings.asked]:
            drawn = self.buffers[client].draw(settings.fed, "reference", plan.round)
            if drawn:
                network = plain_network(self.data, self.make, self.state).train()
                found[client] = self.on_samples(network, drawn, plan.task)
        self.references.append(found)
        if found:
            self.reference = torch.stack(list(found.values())).mean(0)


EVEN: dict[str, Any] = {"num_clients": 4, "partition": None, "schedule": {"batch_size": 8}}
"""Options under which no batch has a single sample, which ordinary BatchNorm refuses."""


def replay_data(stream: Any = None, **options: Any) -> FederatedDataModule:
    """Five clients of 3 to 30 samples in batches of 4, three of them in each of four rounds, two side by side."""
    schedule = {"rounds_per_task": 2, "clients_per_round": 3, "batch_size": 4, "cohort_width": 2}
    schedule |= options.pop("schedule", {})
    return tiny_data(stream, **{"num_clients": 5, "partition": UNBALANCED, "schedule": schedule, **options})


SCENARIOS: dict[str, Callable[[], FederatedDataModule]] = {
    "domain": partial(replay_data),
    "task": lambda: replay_data(split(2, train=120)),
    "class": lambda: replay_data(split(2, train=120), scenario="class", class_loss="seen"),
    "cumulative": lambda: replay_data(split(2, train=120), exposure="cumulative"),
}


def assert_is_the_loop(
    data: FederatedDataModule,
    methods: dict[str, Method],
    settings: Settings,
    network: NetworkFactory = mlp,
    engine: EngineOptions | None = None,
    size: int = 5,
) -> Training:
    """Require that a run in float64 ends with the loop's weights, to 1e-9, and that methods changed over 5 steps."""
    client = replay_client(data, methods, double(network), ReplayBuffer(size), engine)
    start = copy.deepcopy(client.network.state_dict())
    found = weights(fit(client, data))
    loop = Training(data, double(network), start, settings, size)
    torch.testing.assert_close(found, loop.run(), rtol=0, atol=1e-9)
    assert loop.changed > 5
    return loop
