"""Falling learning rates against separate torch optimizers, one per client, each with its own learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.close import assert_close
from support.naive import plain_network, task_loss, train_client, used_outputs
from support.tiny import (
    NetworkFactory,
    double,
    fit,
    five_unequal,
    mlp,
    norm_net,
    permuted,
    runs_in_double,
    sgd,
    source,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.engines import EngineOptions
from cfl.engines.scaled_steps import LINEAR_OPTIMIZERS, ScaledSteps
from cfl.methods import APD, SCAFFOLD, FedProx, FedWeIT, LearningRateDecay, Method, PersonalLayers
from cfl.methods.components.validation_loss import validation_loss
from cfl.models import MADE
from cfl.models.evaluation import evaluation_mode
from cfl.runtime.errors import ConfigError

OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "sgd": (torch.optim.SGD, 0.4),
    "momentum": (partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01), 0.2),
    "adam": (partial(torch.optim.Adam, weight_decay=0.01), 0.05),
    "adamw": (partial(torch.optim.AdamW, weight_decay=0.1), 0.05),
}
DECAY = {"factor": 4.0, "patience": 1, "threshold": 0.15}


def data_of(width: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round, two tasks of seven rounds with two local epochs."""
    settings = {"partition": Dirichlet(1.0, 4), "validation": 0.3, **options}
    stream = settings.pop("stream", None) or permuted(2, train=160)
    return five_unequal(stream, width, **{"schedule": {"rounds_per_task": 7, "local_epochs": 2}, **settings})


# The step of an optimizer with another learning rate.


def steps_of(make: Callable[..., torch.optim.Optimizer], start: Tensor, gradients: list[Tensor], lr: float) -> Tensor:
    """Final weights of an ordinary optimizer. Gradients depend on the weights, so that any difference shows."""
    weight = nn.Parameter(start.clone())
    optimizer = make([weight], lr=lr)
    for gradient in gradients:
        weight.grad = gradient + 0.3 * weight.detach()
        optimizer.step()
    return weight.detach()


def rescaled(make: Callable[..., torch.optim.Optimizer], start: Tensor, gradients: list[Tensor], lr: float) -> Tensor:
    """Final weights of clients ``[k, n]`` under one optimizer with rescaled steps."""
    weight, still = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = make([weight, still], lr=lr)
    scaled = ScaledSteps(FACTORS)
    for gradient in gradients:
        weight.grad = gradient + 0.3 * weight.detach()
        scaled.remember({"weight": weight, "still": still})
        optimizer.step()
        scaled.rescale()
    assert torch.equal(still, start)
    return weight.detach()


FACTORS = torch.tensor([1.0, 1 / 3, 0.0, 1 / 27], dtype=torch.float64)
VARIANTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.3},
    "NAdam": {"weight_decay": 0.3, "decoupled_weight_decay": True},
    "RMSprop": {"momentum": 0.8, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1},
}


def drawn(clients: int = 4, steps: int = 9) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(clients, 7, generator=generator, dtype=torch.float64)
    return start, [torch.randn(clients, 7, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("name", sorted(LINEAR_OPTIMIZERS))
def test_a_rescaled_step_is_that_of_an_optimizer_with_the_clients_own_learning_rate(name: str) -> None:
    make = partial(getattr(torch.optim, name), **VARIANTS.get(name, {}))
    start, gradients = drawn()
    found = rescaled(make, start, gradients, 0.05)
    for row, factor in enumerate(FACTORS.tolist()):
        expected = start[row] if factor == 0 else steps_of(make, start[row], [g[row] for g in gradients], 0.05 * factor)
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-13)
        assert factor not in (0.0, 1.0) or torch.equal(found[row], expected), "bit for bit"
    assert (found[0] - found[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["Rprop", "ASGD"])
def test_the_others_would_not_do(name: str) -> None:
    make = partial(getattr(torch.optim, name), **{"Rprop": {"step_sizes": (0.01, 0.06)}, "ASGD": {"lambd": 0.5}}[name])
    start, gradients = drawn()
    found = rescaled(make, start, gradients, 0.05)
    expected = steps_of(make, start[1], [g[1] for g in gradients], 0.05 / 3)
    assert (found[1] - expected).abs().max() > 1e-6


def test_no_factor_or_only_ones_is_nothing() -> None:
    assert ScaledSteps.of([None, None]) is None
    assert ScaledSteps.of([None, torch.ones(3)]) is None
    several = ScaledSteps.of([torch.tensor([1.0, 0.5]), None, torch.tensor([0.5, 0.5])])
    assert several is not None
    assert several.factors.tolist() == [0.5, 0.25]


# A whole run.


@dataclass
class Rate:
    """The state of a client's learning rate, as in the published code."""

    task: int
    lr: float
    lowest: float = math.inf
    waited: int = 0

    def hear(self, loss: float, factor: float, patience: int, threshold: float, floor: float) -> None:
        if self.lr == 0:
            return
        if loss < self.lowest * (1 - threshold):
            self.lowest, self.waited = loss, 0
        else:
            self.waited += 1
            if self.waited >= patience:
                self.lr, self.waited = self.lr / factor, 0
        if self.lr <= floor:
            self.lr = 0.0


@dataclass
class Loop:
    """A plain loop of federated averaging whose clients have learning rates of their own."""

    data: FederatedDataModule
    network: nn.Module
    make: Any
    lr: float
    floor: float
    decay: dict[str, Any] = field(default_factory=lambda: DECAY)
    rates: dict[int, Rate] = field(default_factory=dict)
    seen: list[dict[int, float]] = field(default_factory=list)
    stopped_as_received: int = 0

    def run(self) -> dict[str, Tensor]:
        data, state = self.data, copy.deepcopy(self.network.state_dict())
        for number in range(data.num_rounds):
            plan = data.rounds.round(number)
            trained = []
            for client in plan.clients:
                rate = self.rates.get(client)
                if rate is None or rate.task != plan.task:
                    rate = self.rates[client] = Rate(plan.task, self.lr)
                own = copy.deepcopy(self.network)
                own.load_state_dict(state)
                if rate.lr > 0:
                    train_client(own, data, plan, client, partial(self.make, lr=rate.lr))
                self.stopped_as_received += rate.lr == 0
                trained.append(self.kept(state, own.state_dict(), plan.task))
                rate.hear(self.loss(own, plan.task, client), **self.decay, floor=self.floor)
            self.seen.append({client: self.rates[client].lr for client in plan.clients})
            state = {n: torch.stack([t[n].double() for t in trained]).mean(0).to(v.dtype) for n, v in state.items()}
        return state

    def kept(self, start: Mapping[str, Tensor], result: dict[str, Tensor], task: int) -> dict[str, Tensor]:
        outputs = used_outputs(self.data, task)
        for name in ("head.weight", "head.bias"):
            rows = start[name].clone()
            rows[outputs] = result[name][outputs]
            result[name] = rows
        return result

    @torch.no_grad()
    def loss(self, network: nn.Module, task: int, client: int) -> float:
        images, own = self.data.tasks[task], self.data.validation_dealt[task][client]
        logits = network.eval()(images.transform(images.train.images[own]))
        return task_loss(self.data, task, logits, images.train.labels[own]).item()


run = runs_in_double(data_of)


def loop(data: FederatedDataModule, network: NetworkFactory, optimizer: str, floor: float) -> Loop:
    make, lr = OPTIMIZERS[optimizer]
    start = tiny_client(data, double(network)).network.state_dict()
    return Loop(data, plain_network(data, double(network), start), make, lr, floor)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_averaging_of_clients_with_optimizers_of_their_own(optimizer: str, width: int) -> None:
    make, lr = OPTIMIZERS[optimizer]
    floor = lr / 10
    naive = loop(data_of(), mlp, optimizer, floor)
    expected = naive.run()
    decay = LearningRateDecay(**DECAY, floor=floor)  # type: ignore[arg-type]
    federation = run({"decay": decay}, data_of(width), optimizer=partial(make, lr=lr))
    # The adaptive optimizers of this test amplify rounding where a gradient is nearly zero.
    assert_close(weights(federation), expected, 1e-10 if "adam" not in optimizer else 1e-8)
    assert any(len(set(rates.values())) > 1 for rates in naive.seen), "clients with unlike rates in one round"
    assert any(0 < rate < lr for rates in naive.seen for rate in rates.values())
    assert naive.stopped_as_received > 0
    for client, rate in naive.rates.items():
        held = federation.clients.get("learning rate", client)
        assert held is not None
        assert (int(held["task"]), int(held["waited"])) == (rate.task, rate.waited)
        assert lr * float(held["rate"]) == pytest.approx(rate.lr, rel=1e-12)
        assert float(held["best"]) == pytest.approx(rate.lowest, rel=1e-6)


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (norm_net, {}),
        (mlp, {"stream": split(2, classes=4, train=240), "scenario": "task"}),
        (mlp, {"stream": split(2, classes=4, train=240), "scenario": "class", "class_loss": "seen"}),
    ],
    ids=["batchnorm", "task-incremental", "class-incremental"],
)
def test_the_loss_is_that_of_the_clients_own_model_over_its_tasks_outputs(network: Any, options: Any) -> None:
    options = {"partition": None, **options}
    naive = loop(data_of(**options), network, "momentum", 0.01)
    expected = naive.run()
    make, lr = OPTIMIZERS["momentum"]
    decay = LearningRateDecay(**DECAY, floor=0.01)  # type: ignore[arg-type]
    found = run({"decay": decay}, data_of(3, **options), network, partial(make, lr=lr))
    assert_close(weights(found), expected, 1e-9)
    assert naive.stopped_as_received > 0
    assert any(rate < lr for rates in naive.seen for rate in rates.values())
    (first, last) = decay.report().rows
    assert (first["task"], last["task"]) == (0, 1)
    own = [rate for rate in naive.rates.values() if rate.task == 1]
    assert last["clients"] == len(own)
    assert last["stopped"] == sum(rate.lr == 0 for rate in own)
    assert last["mean_rate"] == pytest.approx(sum(rate.lr for rate in own) / len(own) / lr, rel=1e-12)
    assert last["validation_loss"] == pytest.approx(sum(rate.lowest for rate in own) / len(own), rel=1e-9)


@pytest.mark.parametrize("patience", [2, 3])
def test_rates_fall_after_as_many_rounds_without_a_lower_loss_as_patience_says(patience: int) -> None:
    options: dict[str, Any] = {"schedule": {"rounds_per_task": 12, "local_epochs": 1}}
    naive = loop(data_of(**options), mlp, "sgd", 0.01)
    naive.decay = {"factor": 4.0, "patience": patience, "threshold": 0.25}
    expected = naive.run()
    make, lr = OPTIMIZERS["sgd"]
    decay = LearningRateDecay(**naive.decay, floor=0.01)
    found = run({"decay": decay}, data_of(3, **options), mlp, partial(make, lr=lr))
    assert_close(weights(found), expected, 1e-10)
    assert any(rate < lr for rates in naive.seen for rate in rates.values())
    assert any(rate.waited for rate in naive.rates.values())
    for client, rate in naive.rates.items():
        held = found.clients.get("learning rate", client)
        assert held is not None
        assert (int(held["task"]), int(held["waited"])) == (rate.task, rate.waited)
        assert lr * float(held["rate"]) == pytest.approx(rate.lr, rel=1e-12)


def test_clients_with_tasks_of_their_own_are_validated_over_the_outputs_of_these() -> None:
    """Hardly anything is learned here, so that every client's lowest loss is the initial network's."""
    order = [[2, 0], [1, 2], [0, 1]]
    data = tiny_data(
        split(3, classes=6, train=240),
        num_clients=3,
        scenario="task",
        validation=0.3,
        sequences=FixedTasks(order),
        schedule={"rounds_per_task": 1, "cohort_width": 3},
    )
    client = tiny_client(data, double(mlp), partial(torch.optim.SGD, lr=1e-10), {"decay": LearningRateDecay(floor=0.0)})
    start = copy.deepcopy(client.network)
    found = fit(client, data)
    for number, tasks in enumerate(order):
        batches = list(data.validation_batches(1, number, 50, torch.device("cpu")))
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        outputs = [2 * tasks[1], 2 * tasks[1] + 1]
        assert set(y.tolist()) == set(outputs)
        with evaluation_mode(start), torch.no_grad():
            logits = start(x.double())[:, outputs]
        held = found.clients.get("learning rate", number)
        assert held is not None
        expected = F.cross_entropy(logits, y - outputs[0]).item()
        assert float(held["best"]) == pytest.approx(expected, rel=1e-6)


def test_the_figures_count_all_clients_of_all_tasks_alike() -> None:
    decay = LearningRateDecay()
    rows = [{"clients": 1, "stopped": 0, "mean_rate": 1.0}, {"clients": 3, "stopped": 2, "mean_rate": 0.2}]
    decay.load_state_dict({"rows": rows})
    assert decay.report().figures == {"stopped_share": 2 / 4, "mean_rate": pytest.approx((1.0 + 3 * 0.2) / 4)}


def test_without_running_statistics_the_batchs_own_are_used() -> None:
    data = data_of(partition=None)
    found = run({"decay": LearningRateDecay(patience=1)}, data, norm_net, federated={"batchnorm": "drop"})
    client = data.rounds.round(data.num_rounds - 1).clients[0]
    held = found.clients.get("learning rate", client)
    assert held is not None
    assert math.isfinite(float(held["best"]))
    assert all(m.running_mean is not None and m.training for m in found.network.modules() if hasattr(m, "running_mean"))


def test_models_are_validated_as_they_are_tested() -> None:
    class Blank(Method):
        def as_tested(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: torch.zeros_like(value) for name, value in model.items()}

    for methods in ({"decay": LearningRateDecay(), "blank": Blank()}, {"blank": Blank(), "decay": LearningRateDecay()}):
        data = data_of(partition=None)
        found = run(methods, data, mlp)
        rows = found.methods["decay"].report().rows
        assert [row["validation_loss"] for row in rows] == pytest.approx([math.log(data.num_outputs)] * len(rows))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_worker_threads_take_no_step_at_once_where_rates_differ(optimizer: str) -> None:
    make, lr = OPTIMIZERS[optimizer]
    found = [
        weights(run({"decay": LearningRateDecay(**DECAY)}, data_of(3), mlp, partial(make, lr=lr), EngineOptions(kind)))  # type: ignore[arg-type]
        for kind in ("workers", "vmap")
    ]
    assert_close(found[0], found[1])
    plain = weights(run({}, data_of(3), mlp, partial(make, lr=lr)))
    assert max(float((found[0][n] - plain[n]).abs().max()) for n in plain) > 1e-2


def test_it_composes_in_any_order() -> None:
    found = []
    for width, names in ((1, ("decay", "prox", "own")), (3, ("own", "prox", "decay"))):
        methods: dict[str, Method] = {
            "prox": FedProx(0.5),
            "own": PersonalLayers(["head.*"]),
            "decay": LearningRateDecay(**DECAY),  # type: ignore[arg-type]
        }
        found.append(run({name: methods[name] for name in names}, data_of(width), norm_net))
    first, second = found
    assert_close(weights(first), weights(second))
    assert float(first.clients.get("learning rate", 0)["rate"]) < 1  # type: ignore[index]


# The loss.


def test_tasks_whose_last_round_nobody_joins_are_reported() -> None:
    schedule = {"sampling": "poisson", "clients_per_round": 0.3, "rounds_per_task": 4}
    data = tiny_data(permuted(2), num_clients=4, validation=0.25, schedule=schedule)
    plans = [data.rounds.round(number) for number in range(4)]
    assert not plans[-1].clients
    joined = {client for plan in plans for client in plan.clients}
    apd, decay = APD(consolidation=0.0), LearningRateDecay()
    fit(tiny_client(data, mlp, partial(torch.optim.SGD, lr=0.1), {"apd": apd, "decay": decay}), data)
    assert {row["client"] for row in apd.report().rows if row["task"] == 0} == joined
    row = decay.report().rows[0]
    assert (row["task"], row["clients"]) == (0, len(joined))
    with pytest.raises(ConfigError, match=r"schedule\.sampling.*methods\.weit: nobody joins round 3"):
        fit(tiny_client(data, mlp, partial(torch.optim.SGD, lr=0.1), {"weit": FedWeIT()}), data)


def test_a_density_is_validated_by_its_likelihood() -> None:
    data = tiny_data(Permuted(Binarised(source()), 2), scenario="density", validation=0.3)
    made = partial(MADE, hidden=[6], order_agnostic=True, num_masks=2, eval_orders=2)
    found = run({"decay": LearningRateDecay(patience=1)}, data, made)
    batches = list(data.validation_batches(1, 2, 3, torch.device("cpu")))
    with evaluation_mode(found.network):
        loss = validation_loss(found.network, weights(found), batches)
        expected = -found.network.log_likelihood(torch.cat([x for x, _ in batches])).mean()  # type: ignore[operator]
    assert loss == pytest.approx(expected.item(), rel=1e-12)


def test_batches_of_any_size_give_one_mean() -> None:
    network = nn.Linear(4, 3).double()
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.arange(11) % 2
    allowed = torch.tensor([True, True, False])
    expected = F.cross_entropy(network(x)[:, :2], y).item()
    for size in (1, 4, 11):
        parts: Iterable[tuple[Tensor, Tensor]] = zip(x.split(size), y.split(size), strict=True)
        found = validation_loss(network, dict(network.state_dict()), parts, allowed)
        assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="no samples"):
        validation_loss(network, {}, [])


def test_evaluating_leaves_every_module_in_its_mode() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2))
    network[2].eval()
    with evaluation_mode(network):
        assert not any(module.training for module in network.modules())
    assert [module.training for module in network] == [True, True, False]


# What is refused.


def test_what_cannot_work_is_refused_before_training() -> None:
    def refused(methods: dict[str, Method], match: str, optimizer: Any = sgd, **options: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            run(methods, data_of(**options), optimizer=optimizer)

    decay = LearningRateDecay
    refused({"a": decay()}, r"data\.validation", validation=0.0)
    refused({"a": decay(), "s": SCAFFOLD()}, r"methods = \['a'\].*s\.variant = II")
    refused({"a": decay(floor=0.1)}, r"methods\.a\.floor = 0\.1 .*below the learning rate, 0\.1")
    refused({"a": decay()}, "model.optimizer", partial(torch.optim.Rprop, lr=0.1))
    refused({"a": decay()}, "none has two samples of a task", partition=None, stream=permuted(2, train=5))
    refused({"a": decay()}, "data.exposure", exposure="asynchronous")


def test_a_loss_below_zero_is_lower_only_by_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of densities above 1: with a threshold of 0.1, -9.5 is no improvement on -10, and -11.5 is one."""
    losses = iter([-10.0, -9.5, -11.5])

    def told(self: Any, task: int, clients: list[int], *rest: Any) -> Tensor:
        return torch.full((len(clients),), next(losses), dtype=torch.float64)

    monkeypatch.setattr(LearningRateDecay, "_losses", told)
    schedule = {"rounds_per_task": 3, "cohort_width": 2}
    data = tiny_data(permuted(1), num_clients=2, validation=0.2, schedule=schedule)
    decay = LearningRateDecay(factor=4.0, patience=1, threshold=0.1, floor=1e-6)
    found = fit(tiny_client(data, mlp, sgd, {"decay": decay}), data)
    for client in range(2):
        held = found.clients.get("learning rate", client)
        assert held is not None
        assert (float(held["best"]), float(held["rate"])) == (-11.5, 0.25)
