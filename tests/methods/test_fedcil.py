"""FedCIL against its losses and rounds written out in float64, and that its replay reduces forgetting."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.naive import federated_averaging, plain_network
from support.tiny import (
    ConvNet,
    Rounds,
    at_round,
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
from torch.func import functional_call

from cfl.data.datamodule import FederatedDataModule
from cfl.data.samples import Samples
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import ER, FedCIL, Method, PersonalLayers
from cfl.methods.components.gan.consolidation import MadeBatch, consolidated
from cfl.methods.components.gan.losses import acgan_loss, class_losses, divergences
from cfl.models import ACGAN, MLP
from cfl.models.batchnorm import convert_batchnorm
from cfl.randomness.counter_normals import choices, normals
from cfl.randomness.generators import seed_for, torch_generator
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ENGINES = [EngineOptions("vmap"), EngineOptions("workers", workers=2)]
NOISE = 3
CONSOLIDATION_BATCH, CONSOLIDATION_LR = 4, 0.01
acgan = partial(ACGAN, classifier=mlp, widths=[6], noise_dim=NOISE, generator_norm="none")
normalising = partial(ACGAN, classifier=mlp, widths=[6], noise_dim=NOISE)
dropping = partial(ACGAN, classifier=partial(MLP, hidden=[8], dropout=0.5), widths=[6], noise_dim=NOISE)


def network_in_double(seed: int = 0) -> ACGAN:
    torch.manual_seed(seed)
    return acgan((1, 3, 3), 4).double()


# The loss, and which parts it trains.


def critic_loss(network: ACGAN, image: Tensor, real: bool, y: int, allowed: list[int]) -> Tensor:
    """The critic's loss of one image, written out."""
    logit, classes = network.judge(image.unsqueeze(0))
    probability = logit.sigmoid().squeeze()
    said = probability if real else 1 - probability
    return -said.log() - classes[0, allowed].softmax(0)[allowed.index(y)].log()


@pytest.mark.parametrize("masked", [False, True])
def test_critic_and_generator_each_follow_their_own_loss(masked: bool) -> None:
    network = network_in_double()
    n = 5
    x, noise = torch.randn(n, 1, 3, 3).double(), torch.randn(n, NOISE).double()
    w, v = torch.rand(n).double(), torch.rand(n).double()
    w[2] = v[2] = 0.0
    y = torch.tensor([0, 3, 1, 2, 2])
    allowed = torch.tensor([[True, True, False, False], [False, False, True, True]])[y // 2] if masked else None
    sets = [torch.arange(4)[allowed[i]].tolist() if allowed is not None else list(range(4)) for i in range(n)]
    names = [name for name, _ in network.named_parameters()]

    loss = acgan_loss(network, x, y, w, noise, v, allowed)
    found = dict(zip(names, torch.autograd.grad(loss, list(network.parameters())), strict=True))

    fakes = network.generate(noise, y)
    critic = x.new_zeros(())
    for i in range(n):
        critic = critic + w[i] * critic_loss(network, x[i], True, int(y[i]), sets[i])
        critic = critic + v[i] * critic_loss(network, fakes[i].detach(), False, int(y[i]), sets[i])
    frozen = copy.deepcopy(network).requires_grad_(False)
    generator = sum(v[i] * critic_loss(frozen, fakes[i], True, int(y[i]), sets[i]) for i in range(n))
    assert isinstance(generator, Tensor)
    torch.testing.assert_close(loss, critic + generator, rtol=1e-12, atol=1e-12)
    of_critic = [name for name in names if not name.startswith("generator.")]
    expected = dict(
        zip(of_critic, torch.autograd.grad(critic, [network.get_parameter(n) for n in of_critic]), strict=True)
    )
    of_generator = network.generator_names
    expected |= dict(
        zip(of_generator, torch.autograd.grad(generator, [network.get_parameter(n) for n in of_generator]), strict=True)
    )
    for name in names:
        assert float(expected[name].abs().max()) > 1e-6
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def test_divergences_and_class_losses_over_the_allowed_outputs() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 5).double().requires_grad_(), torch.randn(4, 5).double().requires_grad_()
    allowed = torch.tensor([[True, True, False, True, False]] * 3 + [[True] * 5])
    y = torch.tensor([0, 1, 3, 4])
    found = divergences(a, b, allowed)
    for i in range(4):
        p, q = a[i][allowed[i]].softmax(0), b[i][allowed[i]].softmax(0)
        torch.testing.assert_close(found[i], (p * (p / q).log()).sum())
        place = int(allowed[i][: y[i]].sum())
        torch.testing.assert_close(class_losses(a, y, allowed)[i], -p[place].log())
    gradients = torch.autograd.grad(found.sum(), [a, b])
    for gradient in gradients:
        assert torch.isfinite(gradient).all()
        assert (gradient[:3][~allowed[:3]] == 0).all()
        assert (gradient.abs().sum(1) > 0).all()
    torch.testing.assert_close(divergences(a, b)[3], found[3])


# Whole rounds.


class Loop:
    """Rounds, clients and steps one after another, in float64; data, orders and draws are those of the run."""

    def __init__(
        self, client: Client, data: FederatedDataModule, share: float, consistency: float, steps: int = 0
    ) -> None:
        self.network, self.data, self.share, self.consistency = client.network, data, share, consistency
        self.steps = steps
        self.replayed = data.schedule.batch_size
        self.of_average = False
        self.model = {n: t.detach().clone() for n, t in client.network.state_dict().items()}
        self.parameters = [n for n, _ in client.network.named_parameters()]
        self.replay: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        for number in range(self.data.num_rounds):
            plan = self.data.rounds.round(number)
            trained = [self.local(plan, client) for client in plan.clients]
            stacked = {n: torch.stack([t[n] for t in trained]) for n in self.model}
            self.model = {n: t.mean(0, dtype=torch.float64).to(t.dtype) for n, t in stacked.items()}
            if self.steps:
                self.model = self.consolidated(plan, dict(zip(plan.clients, trained, strict=True)))
            if plan.last_of_task:
                self.replay = self.model
        return self.model

    def draws(self, purpose: str, plan: RoundPlan, client: int, step: int) -> Tensor:
        return torch.tensor([seed_for(self.data.seed, f"fedcil {purpose}", plan.round, client, step)])

    def noise(self, purpose: str, count: int, *place: Any) -> Tensor:
        return normals(self.draws(purpose, *place), count * NOISE).view(count, NOISE).double()

    def started(self) -> dict[str, Tensor]:
        """A copy of the global model whose parameters require gradients."""
        return {n: t.clone().requires_grad_(n in self.parameters) for n, t in self.model.items()}

    def local(self, plan: RoundPlan, client: int) -> dict[str, Tensor]:
        model = self.started()
        at_round(self.data, plan.round)
        for batch in self.data.train_dataloader():
            if client not in batch.clients:
                continue
            row = batch.clients.index(client)
            index = batch.index[row][batch.mask[row]]
            if not len(index):
                continue
            place = (plan, client, batch.step)
            x, y = self.data.gather(plan.task, index)
            parts = [(1.0, x.double(), y, self.noise("noise", len(y), *place))]
            if self.replay and self.share:
                size = self.replayed
                old = self.data.outputs.own[: plan.task].any(0).nonzero().squeeze(1)
                old_y = choices(self.draws("replayed outputs", *place), old, size)[0]
                made = self.images(self.replay, self.noise("replay", size, *place), old_y)
                parts = [(1.0 - self.share, *parts[0][1:])]
                parts.append((self.share, made, old_y, self.noise("noise against replay", size, *place)))
            loss = self.of_parts(model, parts)
            if self.consistency and plan.round_in_task:
                loss = loss + self.consistency * self.consistent(model, x.double(), y, place)
            trained = [model[n] for n in self.parameters]
            gradients = torch.autograd.grad(loss, trained)
            with torch.no_grad():
                for tensor, gradient in zip(trained, gradients, strict=True):
                    tensor -= 0.1 * gradient
        return {n: t.detach() for n, t in model.items()}

    def consolidated(self, plan: RoundPlan, trained: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Steps of Adam from the average, on images of clients that have the class, and of the replay generator."""
        size, data, own = CONSOLIDATION_BATCH, self.data, self.data.outputs.own
        generator = torch_generator(data.seed, "fedcil consolidation", plan.round)
        clients = sorted(trained)
        labels = {
            c: data.tasks[plan.task].train.labels[torch.from_numpy(data.indices[plan.task][c])]
            + data.outputs.offsets[plan.task]
            for c in clients
        }
        known = torch.tensor([[bool((labels[c] == output).any()) for output in range(own.shape[1])] for c in clients])
        if self.of_average:  # whose generator makes images of all of the task's outputs
            clients, trained, known = [-1], {-1: self.model}, own[[plan.task]]
        everywhere = [output for output in range(own.shape[1]) if known[:, output].any()]

        def drawn(options: list[int]) -> Tensor:
            return torch.tensor(options)[torch.randint(len(options), (self.steps, size), generator=generator)]

        def noise() -> Tensor:
            return torch.randn(self.steps, size, NOISE, generator=generator).double()

        y = drawn(everywhere)
        who = torch.multinomial(known.T[y.flatten()].float(), 1, generator=generator).view(self.steps, size)
        given, parts = noise(), 1
        if self.replay and self.share:
            parts = 2
            old_y = drawn(own[: plan.task].any(0).nonzero().squeeze(1).tolist())
            old_given = noise()
        against = [noise() for _ in range(parts)]
        model = self.started()
        adam = torch.optim.Adam([model[n] for n in self.parameters], lr=CONSOLIDATION_LR, betas=(0.5, 0.999))
        for step in range(self.steps):
            made = [
                self.images(trained[clients[who[step, i]]], given[step, i : i + 1], y[step, i : i + 1])
                for i in range(size)
            ]
            share = self.share if parts == 2 else 0.0
            images = [(1 - share, torch.cat(made), y[step], against[0][step])]
            if parts == 2:
                old = self.images(self.replay, old_given[step], old_y[step])
                images.append((share, old, old_y[step], against[1][step]))
            loss = self.of_parts(model, images)
            adam.zero_grad()
            loss.backward()
            adam.step()
        # The generator keeps the averaged statistics of the clients.
        return {n: t.detach() if n in self.parameters else self.model[n] for n, t in model.items()}

    def call(self, model: Mapping[str, Tensor], what: str, *arguments: Tensor) -> Any:
        class Called(nn.Module):
            def __init__(self, network: nn.Module) -> None:
                super().__init__()
                self.network = network

            def forward(self, *arguments: Tensor) -> Any:
                return getattr(self.network, what)(*arguments)

        return functional_call(Called(self.network), {f"network.{n}": t for n, t in model.items()}, arguments)

    def images(self, model: Mapping[str, Tensor], noise: Tensor, y: Tensor) -> Tensor:
        """Images of a model's generator in evaluation mode."""
        self.network.eval()
        made: Tensor = self.call(model, "generate", noise, y).detach()
        self.network.train()
        return made

    def masked(self, logits: Tensor, y: Tensor) -> Tensor:
        """Logits over the outputs of each label's task, other outputs at -inf. Tasks here share all outputs or none."""
        own = self.data.outputs.own
        allowed = own[[int(own[:, label].int().argmax()) for label in y]]
        return logits.masked_fill(~allowed, -torch.inf)

    def of_parts(self, model: Any, parts: Sequence[tuple[float, Tensor, Tensor, Tensor]]) -> Tensor:
        """Loss of parts ``(share, images, outputs, noise)``. Their generated images are normalised as one batch."""
        noise, y = torch.cat([part[3] for part in parts]), torch.cat([part[2] for part in parts])
        fakes = self.call(model, "generate", noise, y).split([len(part[2]) for part in parts])
        losses = [share * self.of_part(model, x, y, fake) for (share, x, y, _), fake in zip(parts, fakes, strict=True)]
        return torch.stack(losses).sum()

    def of_part(self, model: Any, x: Tensor, y: Tensor, fake: Tensor) -> Tensor:
        real, classes = self.call(model, "judge", x)
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = loss + F.cross_entropy(self.masked(classes, y), y)
        real, classes = self.call(model, "judge", fake.detach())
        loss = loss + F.binary_cross_entropy_with_logits(real, torch.zeros_like(real))
        loss = loss + F.cross_entropy(self.masked(classes, y), y)
        real, classes = self.call({n: t.detach() for n, t in model.items()}, "judge", fake)
        loss = loss + F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return loss + F.cross_entropy(self.masked(classes, y), y)

    def consistent(self, model: Any, x: Tensor, y: Tensor, place: Any) -> Tensor:
        seen = self.data.outputs.own[: place[0].task + 1].any(0).nonzero().squeeze(1)
        labels = choices(self.draws("outputs", *place), seen, len(y))[0]
        sent_own = self.images(self.model, self.noise("own classes", len(y), *place), y)
        sent_any = self.images(self.model, self.noise("any class", len(y), *place), labels)
        made = self.images(model, self.noise("noise", len(y), *place), labels)

        def p(images: Tensor, of: Tensor) -> Tensor:
            own = self.data.outputs.own
            logits = self.call(model, "judge", images)[1]
            firsts = [int(own[:, label].int().argmax()) for label in of]
            rows = [row[own[task]].softmax(0) for row, task in zip(logits, firsts, strict=True)]
            return torch.stack(rows)

        p_own, p_real, p_any, p_made = p(sent_own, y), p(x, y), p(sent_any, labels), p(made, labels)
        loss = (p_own * (p_own / p_real).log()).sum() + (p_any * (p_any / p_made).log()).sum()
        classes = self.masked(self.call(model, "judge", sent_any)[1], labels)
        return (loss + F.cross_entropy(classes, labels, reduction="sum")) / len(y)


@pytest.mark.parametrize("engine", ENGINES, ids=["vmap", "workers"])
@pytest.mark.parametrize("scenario", ["domain", "task"])
@pytest.mark.parametrize(
    ("share", "consistency", "network"),
    [(0.5, 0.0, normalising), (0.3, 0.7, normalising), (0.3, 0.7, acgan), (0.0, 0.7, acgan), (0.0, 0.0, acgan)],
)
def test_a_run_is_what_the_equations_say(
    share: float, consistency: float, network: Any, scenario: str, engine: EngineOptions
) -> None:
    stream = permuted(3, train=50) if scenario == "domain" else split(3, classes=6, train=50)
    data = tiny_data(stream, schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 2})
    method = FedCIL(share, consistency=consistency, consolidation_steps=0)
    client = tiny_client(data, double(network), sgd, {"cil": method}, engine)
    loop = Loop(client, data, share, consistency)
    federation = fit(client, data)
    found, statistics = weights(federation), 0
    for name, expected in loop.run().items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)
        statistics += name.endswith("running_var") and not torch.allclose(expected, torch.ones_like(expected))
    assert statistics == (network is normalising)


@pytest.mark.parametrize("engine", ENGINES, ids=["vmap", "workers"])
def test_without_replay_and_consolidation_it_is_federated_averaging_of_its_loss(engine: EngineOptions) -> None:
    """The expected run has ordinary networks and optimizers and computes losses image by image.

    No options give federated averaging of the cross-entropy: the critic always learns from generated images too.
    """
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 2})
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
    method = FedCIL(replay_share=0.0, consistency=0.0, consolidation_steps=0)
    client = tiny_client(data, double(acgan), momentum, {"cil": method}, engine)
    network = plain_network(data, double(acgan), client.network.state_dict())
    every = list(range(data.num_outputs))

    def loss_of(network: nn.Module, x: Tensor, y: Tensor, place: tuple[int, int, int]) -> Tensor:
        assert isinstance(network, ACGAN)
        key = torch.tensor([seed_for(data.seed, "fedcil noise", *place)])
        fakes = network.generate(normals(key, len(y) * NOISE).view(len(y), NOISE).double(), y)
        judge = copy.deepcopy(network).requires_grad_(False)
        losses = []
        for image, fake, label in zip(x.double(), fakes, y.tolist(), strict=True):
            of_critic = critic_loss(network, image, True, label, every)
            of_critic = of_critic + critic_loss(network, fake.detach(), False, label, every)
            losses.append(of_critic + critic_loss(judge, fake, True, label, every))
        return torch.stack(losses).mean()

    expected, _ = federated_averaging(network, data, momentum, server_momentum=0.5, loss_of=loss_of)
    found = weights(fit(client, data, {"server_momentum": 0.5}))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 5])
def test_as_many_images_are_replayed_as_the_option_says(size: int) -> None:
    data = tiny_data(permuted(3, train=50), schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 2})
    assert size != data.schedule.batch_size
    method = FedCIL(0.3, consistency=0.0, consolidation_steps=0, replay_batch_size=size)
    client = tiny_client(data, double(normalising), sgd, {"cil": method}, ENGINES[0])
    loop = Loop(client, data, 0.3, 0.0)
    loop.replayed = size
    found = weights(fit(client, data))
    torch.testing.assert_close(found, loop.run(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("source", ["clients", "average"])
@pytest.mark.parametrize(("scenario", "network"), [("domain", normalising), ("domain", acgan), ("task", normalising)])
def test_a_run_with_consolidation_is_what_the_equations_say(scenario: str, network: Any, source: Any) -> None:
    """In every round the server trains the average further, on images of the clients' generators or of its own."""
    stream = permuted(3, train=50) if scenario == "domain" else split(3, classes=6, train=50)
    data = tiny_data(stream, schedule={"rounds_per_task": 2, "clients_per_round": 3, "cohort_width": 2})
    method = FedCIL(
        0.3,
        consolidation_steps=2,
        consolidation_batch_size=CONSOLIDATION_BATCH,
        consolidation_lr=CONSOLIDATION_LR,
        consolidation_source=source,
    )
    client = tiny_client(data, double(network), sgd, {"cil": method}, ENGINES[0])
    loop = Loop(client, data, 0.3, 0.0, steps=2)
    loop.of_average = source == "average"
    federation = fit(client, data)
    torch.testing.assert_close(weights(federation), loop.run(), rtol=0, atol=1e-9)


def test_classes_compete_within_their_task_or_with_all_seen() -> None:
    for scenario, options, expected in (
        ("task", {}, [True, True, False, False, False, False]),
        ("class", {"class_loss": "seen"}, [True, True, True, True, False, False]),
    ):
        data = tiny_data(split(3, classes=6), scenario=scenario, schedule={"rounds_per_task": 1}, **options)
        method = FedCIL(consolidation_steps=0)
        fit(tiny_client(data, acgan, sgd, {"cil": method}), data)
        allowed = method._allowed(torch.tensor([[0], [1]]), 1)
        assert allowed is not None
        assert allowed[:, 0].tolist() == [expected, expected]


# Replay.


def test_there_is_no_replay_in_the_first_task() -> None:
    """The replay share matters from the second task on. A run of one task sends no replay generator."""
    watched = []
    for share in (0.0, 0.5):
        data, watch = tiny_data(), Rounds()
        fit(tiny_client(data, acgan, sgd, {"cil": FedCIL(share, consolidation_steps=0)}), data, None, [watch])
        watched.append(watch.models)
    for number, (left, right) in enumerate(zip(*watched, strict=True)):
        assert all(torch.equal(left[n], right[n]) for n in left) == (number < 3)
    data = tiny_data(permuted(1))
    federation = fit(tiny_client(data, acgan, sgd, {"cil": FedCIL(consolidation_steps=0)}), data)
    assert set(federation.channel.downlink_bytes) == {"model"}


def test_bytes_of_the_replay_generator_once_per_client_and_task() -> None:
    data = tiny_data(permuted(3), num_clients=6, schedule={"rounds_per_task": 4, "clients_per_round": 2})
    network = acgan((1, 4, 4), 4)
    size = 4 * sum(network.get_parameter(name).numel() for name in network.generator_names)
    method = FedCIL(consolidation_steps=2, consolidation_batch_size=4)
    federation = fit(tiny_client(data, acgan, sgd, {"cil": method}), data)
    plans = [data.rounds.round(number) for number in range(data.num_rounds)]
    sampled = [{client for plan in plans if plan.task == task for client in plan.clients} for task in range(3)]
    assert 2 < len(sampled[1]) < 8
    down, up = federation.channel.downlink_bytes, federation.channel.uplink_bytes
    assert down["cil replay generator"] == size * (len(sampled[1]) + len(sampled[2]))
    assert up["cil generators"] == (size + 4) * 2 * data.num_rounds  # and a byte for each output
    assert method.report().figures == {"replay_generator_bytes": size, "replay_share": 0.5}


@pytest.mark.parametrize("seed", [0, 1])
def test_replay_forgets_less(seed: int) -> None:
    """Less than federated averaging of the same network, and less than the AC-GAN without replay."""
    larger = partial(ACGAN, classifier=partial(MLP, hidden=[32], dropout=0.0), widths=[32], noise_dim=4)
    forgotten = []
    for methods in ({}, {"cil": FedCIL(0.0, consolidation_steps=0)}, {"cil": FedCIL(consolidation_steps=0)}):
        schedule = {"rounds_per_task": 8, "local_epochs": 5, "batch_size": 10, "cohort_width": 4}
        data = tiny_data(permuted(2, train=200, test=200), seed=seed, schedule=schedule)
        matrix = fit(tiny_client(data, larger, sgd, dict(methods)), data).accuracy.compute()
        forgotten.append(float(matrix[0, 0] - matrix[1, 0]))
    assert forgotten[2] < forgotten[0] - 10
    assert forgotten[2] < forgotten[1] - 5


# Consolidation at the server.


def test_consolidation_is_adam_on_the_loss() -> None:
    network = network_in_double().eval()
    before = copy.deepcopy(network.state_dict())
    torch.manual_seed(1)
    batches = []
    for step in range(3):
        x, noise = torch.randn(6, 1, 3, 3).double(), torch.randn(6, NOISE).double()
        allowed = torch.ones(6, 4, dtype=torch.bool) if step else None
        batches.append(MadeBatch(x, torch.randint(4, (6,)), torch.rand(6).double(), noise, allowed, {}))
    names = [name for name, _ in network.named_parameters()]
    found = consolidated(network, network.state_dict(), names, batches, lr=0.01)
    head = consolidated(network, network.state_dict(), ["head.weight"], batches[:1], lr=0.01)
    first = consolidated(network, network.state_dict(), names, batches[:1], lr=0.01)
    assert list(head) == ["head.weight"]
    assert torch.equal(head["head.weight"], first["head.weight"])
    assert not torch.equal(head["head.weight"], before["head.weight"])
    assert not network.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.999))
    for batch in batches:
        optimizer.zero_grad()
        acgan_loss(network, *batch[:4], batch.weights, batch.allowed).backward()
        optimizer.step()
    for name, tensor in network.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=1e-12)


def served(source: Any, steps: int = 3, **options: Any) -> tuple[FedCIL, Federation, Rounds]:
    data = tiny_data(split(2, classes=8), num_clients=4, schedule={"rounds_per_task": 2, "clients_per_round": 3})
    method = FedCIL(consolidation_steps=steps, consolidation_source=source, consolidation_lr=0.01, **options)
    watch = Rounds()
    return method, fit(tiny_client(data, double(dropping), sgd, {"cil": method}), data, None, [watch]), watch


@pytest.mark.parametrize("source", ["clients", "average"])
def test_consolidation_changes_the_model_and_repeats_exactly(source: Any) -> None:
    (method, federation, watch), (_, _, again) = served(source), served(source)
    plain = served(source, steps=0)[2]
    for left, right in zip(watch.models, again.models, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert max(float((watch.models[0][n] - plain.models[0][n]).abs().max()) for n in plain.models[0]) > 1e-3
    assert method.individual_uplinks == (source == "clients")
    assert ("cil generators" in federation.channel.uplink_bytes) == (source == "clients")
    assert not FedCIL(consolidation_steps=0).individual_uplinks
    assert not Method.individual_uplinks


def test_consolidation_leaves_frozen_parameters_alone() -> None:
    """Frozen parameters are neither trained nor sent, so clients would never receive the server's changes."""

    def frozen(input_shape: tuple[int, int, int], num_outputs: int) -> ACGAN:
        network = dropping(input_shape, num_outputs)
        for parameter in network.trunk.parameters():
            parameter.requires_grad_(False)
        return network

    data = tiny_data(split(2, classes=8), num_clients=4, schedule={"rounds_per_task": 2, "clients_per_round": 3})
    client = tiny_client(data, double(frozen), sgd, {"cil": FedCIL(consolidation_steps=3, consolidation_lr=0.01)})
    before = {name: tensor.clone() for name, tensor in client.network.state_dict().items()}
    assert len(client.frozen) >= 2
    for name, tensor in weights(fit(client, data)).items():
        assert torch.equal(tensor, before[name]) == (name in client.frozen), name


def test_made_batches_are_balanced_and_come_from_generators_that_know_the_class() -> None:
    method, federation, _ = served("clients", consolidation_batch_size=50)
    plan = federation.schedule.round(3)  # of the second task: outputs 4 to 7, after 0 to 3
    network = federation.network
    assert isinstance(network, ACGAN)
    generators = []
    for value in (-1.0, 0.0, 1.0):  # images of one colour each
        tensors = {n: torch.zeros_like(network.state_dict()[n]) for n in network.generator_names}
        tensors["generator.layers.1.bias"].fill_(value)
        generators.append(tensors)
    held = torch.zeros(3, 8, dtype=torch.bool)
    held[0, 4], held[1, 4:6], held[2, 7] = True, True, True
    method.consolidation_steps = 40
    batches = list(method._made_batches(plan, generators, held, torch.device("cpu")))
    assert len(batches) == 40
    x, y = torch.stack([b.x[:50] for b in batches]).flatten(0, 1), torch.stack([b.y[:50] for b in batches]).flatten()
    counts = y.bincount(minlength=8)
    assert counts[:4].sum() == counts[6] == 0
    for count in counts[[4, 5, 7]].tolist():
        assert abs(count - 2000 / 3) < 5 * (2000 * 2 / 9) ** 0.5
    makers = x.flatten(1).mean(1).sign().long() + 1
    for image, label, maker in zip(x, y, makers, strict=True):
        assert float(image.std()) < 1e-9
        assert held[maker, label]
    of_first = (makers[y == 4] == 0).double().mean()
    assert abs(float(of_first) - 0.5) < 5 * 0.5 / int(counts[4]) ** 0.5
    old = torch.stack([b.y[50:] for b in batches]).flatten()
    assert sorted(old.unique().tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(batches[0].weights, torch.full((100,), 0.5 / 50).double())
    noises = torch.stack([b.noise for b in batches])
    assert noises.shape == (40, 100, NOISE)
    assert abs(float(noises.std()) - 1) < 0.05
    assert all(not torch.equal(*pair) for pair in pairwise(noises))
    dropped = [b.dropped["trunk.dropouts.0"] for b in batches]
    assert dropped[0].shape == (100, 8)
    assert not torch.equal(dropped[0], dropped[1])


def test_clients_say_which_classes_they_have() -> None:
    method, federation, _ = served("clients")
    data = federation.data
    for task in (0, 1):
        for client in range(4):
            labels = data.tasks[task].train.labels[torch.from_numpy(data.indices[task][client])] + 4 * task
            assert method._outputs_held(task, client).nonzero().flatten().tolist() == sorted(set(labels.tolist()))


# With other methods.


def test_generated_images_stand_against_all_real_ones() -> None:
    """Generated images have the total weight of all real ones, although not every real one has a generated one."""
    network, method = network_in_double(), FedCIL()
    method.source, method._noise = 2, "noise"
    torch.manual_seed(3)
    x, noise, y = torch.randn(6, 1, 3, 3).double(), torch.randn(6, NOISE).double(), torch.randint(4, (6,))
    source = torch.tensor([0, 0, 2, 1, 1, 0])
    mask = torch.tensor([True, True, True, True, True, False])
    w = torch.tensor([0.2, 0.2, 0.6, 0.4, 0.6, 0.0]).double()
    samples = Samples(y, mask, w, torch.zeros_like(y), source, None, {"noise": noise})
    against = torch.tensor([0.4, 0.4, 1.2, 0.0, 0.0, 0.0]).double()  # the sums are both 2
    found = method.local_loss(network, x, samples)
    torch.testing.assert_close(found, acgan_loss(network, x, y, w, noise, against))
    finished = Samples(y, mask & False, 0 * w, torch.zeros_like(y), source, None, {"noise": noise})
    loss = method.local_loss(network, x, finished)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    assert float(loss.detach()) == 0
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("order", [("er", "cil"), ("cil", "er")])
def test_with_samples_of_other_methods(order: tuple[str, str]) -> None:
    """ER's samples are real images of the loss, in any order of the methods and with both engines."""
    found = []
    for engine in ENGINES:
        made: dict[str, Method] = {"er": ER(size=3), "cil": FedCIL(consolidation_steps=0)}
        data = tiny_data(permuted(2, train=70), schedule={"cohort_width": 3})
        client = tiny_client(data, double(acgan), sgd, {name: made[name] for name in order}, engine)
        found.append(weights(fit(client, data)))
    alone = tiny_data(permuted(2, train=70), schedule={"cohort_width": 3})
    without = weights(fit(tiny_client(alone, double(acgan), sgd, {"cil": FedCIL(consolidation_steps=0)}), alone))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-9)
    assert max(float((found[0][n] - without[n]).abs().max()) for n in without) > 1e-3


# What is refused.


def test_a_network_without_generator_is_refused() -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"model\.network = 'MLP'.*ACGAN, with MLP as its classifier.*methods\.cil"):
        fit(tiny_client(data, mlp, sgd, {"cil": FedCIL()}), data)


def test_parts_that_clients_keep_are_refused_where_the_server_needs_them() -> None:
    for layers, steps, good in ((["head.*"], 0, True), (["head.*"], 1, False), (["generator.*"], 0, False)):
        data = tiny_data(schedule={"rounds_per_task": 1})
        methods = {"cil": FedCIL(consolidation_steps=steps), "own": PersonalLayers(layers)}
        if good:
            assert fit(tiny_client(data, acgan, sgd, methods), data).finished
            continue
        with pytest.raises(ConfigError) as caught:
            fit(tiny_client(data, acgan, sgd, methods), data)
        assert caught.value.key == "methods.cil"


@pytest.mark.parametrize("kept", ["local", "drop"])
def test_a_generator_that_normalises_needs_averaged_statistics(kept: str) -> None:
    data = tiny_data(schedule={"rounds_per_task": 1})
    with pytest.raises(ConfigError) as caught:
        fit(tiny_client(data, normalising, sgd, {"cil": FedCIL()}), data, {"batchnorm": kept})
    assert (caught.value.key, caught.value.value) == ("federated.batchnorm", kept)
    only_the_critic = partial(ACGAN, classifier=partial(ConvNet, norm=True), widths=[6], generator_norm="none")
    critic = tiny_client(data, only_the_critic, sgd, {"cil": FedCIL(consolidation_steps=1)})
    assert fit(critic, data, {"batchnorm": kept}).finished


def test_statistics_that_clients_keep_are_refused_by_their_names() -> None:
    data = tiny_data(schedule={"rounds_per_task": 1})
    methods = {"cil": FedCIL(consolidation_steps=0), "own": PersonalLayers(["generator.norms.*"])}
    with pytest.raises(ConfigError, match=r"running_mean.* kept local"):
        fit(tiny_client(data, normalising, sgd, methods), data)


def test_consistency_is_over_the_images_that_there_are() -> None:
    """Replayed samples have no images to compare: BatchNorm of critic and generator must not see blanks for them."""
    torch.manual_seed(0)
    network = convert_batchnorm(ACGAN((1, 4, 4), 3, classifier=norm_net, widths=[6], noise_dim=NOISE)).double()
    method, count = FedCIL(consistency=1.0), 6
    method.name, method._blanks = "cil", True
    x, noise = torch.randn(count + 4, 1, 4, 4).double(), torch.randn(count + 4, NOISE).double()
    kinds = ("own classes", "any class")
    images = {f"cil images of {kind}": torch.randn(count, 1, 4, 4) for kind in kinds}
    extras = {**images, "cil images of any class: outputs": torch.randint(3, (count,))}

    def loss(added: int) -> tuple[Tensor, dict[str, Tensor]]:
        n, tried = count + added, copy.deepcopy(network).train()
        y, source = torch.arange(n) % 3, (torch.arange(n) >= count).long()
        padded = {name: torch.cat([rows, torch.zeros_like(rows)[:added]]) for name, rows in extras.items()}
        samples = Samples(y, torch.ones(n, dtype=torch.bool), torch.ones(n), torch.zeros_like(y), source, None, padded)
        found = method._consistency_loss(tried, x[:n], noise[:n], samples)
        return found.detach(), {name: b.clone() for name, b in tried.named_buffers()}

    (alone, before), (beside, after) = loss(0), loss(4)
    torch.testing.assert_close(beside, alone)
    torch.testing.assert_close(after, before)


def test_others_samples_have_no_generated_images() -> None:
    """The generator and the critic's statistics of generated images leave out samples for which no noise was drawn."""
    torch.manual_seed(0)
    network = convert_batchnorm(ACGAN((1, 4, 4), 3, classifier=mlp, widths=[6], noise_dim=NOISE)).double()
    x, noise, y = torch.randn(9, 1, 4, 4).double(), torch.randn(9, NOISE).double(), torch.arange(9) % 3
    noise[6:] = 0
    w, drawn = torch.rand(9).double(), torch.arange(9) < 6
    v = torch.where(drawn, w, torch.zeros_like(w))
    tried = copy.deepcopy(network).train()
    beside = acgan_loss(tried, x, y, w, noise, v, None, drawn)
    alone = copy.deepcopy(network).train()
    expected = acgan_loss(alone, x[:6], y[:6], w[:6], noise[:6], v[:6])
    logit, classes = network.judge(x[6:])  # the critic has no BatchNorm here
    expected = expected + (w[6:] * (F.softplus(-logit) + class_losses(classes, y[6:]))).sum()
    torch.testing.assert_close(beside, expected)
    torch.testing.assert_close(dict(tried.named_buffers()), dict(alone.named_buffers()))


def test_replay_runs_in_mixed_precision() -> None:
    data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    method = FedCIL(consistency=0.5, consolidation_steps=1)
    assert fit(tiny_client(data, normalising, sgd, {"cil": method}), data, precision="bf16-mixed").finished


@pytest.mark.parametrize("others", [{}, {"er": ER(2)}], ids=["alone", "beside ER"])
def test_engines_agree_where_samples_have_no_images(others: dict[str, Method]) -> None:
    """Clients of workers have no padding, so that BatchNorm would else be torch's in some passes of a step."""
    found = []
    for engine in ENGINES:
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 2, "cohort_width": 2})
        methods = {"cil": FedCIL(consistency=0.5, consolidation_steps=0), **copy.deepcopy(others)}
        network = double(partial(ACGAN, classifier=norm_net, widths=[6], noise_dim=NOISE))
        found.append(weights(fit(tiny_client(data, network, sgd, methods, engine), data)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-9)
