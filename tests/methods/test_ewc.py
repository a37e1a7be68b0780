"""EWC's penalty against the quadratic written out, with Fishers from a loop over samples, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.close import assert_close
from support.naive_fisher import Before, fisher_by_loop
from support.tiny import (
    NetworkFactory,
    Rounds,
    double,
    fit,
    five_unequal,
    mlp,
    norm_net,
    permuted,
    runs_in_double,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import EWC, FOT, FedCurv, Method, PersonalLayers
from cfl.methods.components.curvature.fisher import diagonal_fisher
from cfl.models import MLP, Network
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import BadUpdate, ConfigError

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def data_of(width: int = 2, tasks: int = 3, **options: Any) -> FederatedDataModule:
    """Five unequal clients, two of them in the first task, three per round, tasks of two rounds."""
    schedule = {"rounds_per_task": 2, **options.pop("schedule", {})}
    settings = {"participation": Joining(4, 1), **options}
    return five_unequal(settings.pop("stream", permuted(tasks)), width, schedule=schedule, **settings)


run = runs_in_double(data_of)


# The quadratic, written out.


def fisher_of(federation: Federation, task: int, client: int, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's Fisher by a loop, averaged over its samples."""
    total, count = fisher_by_loop(federation, task, client, model)
    return {n: value / count for n, value in total.items()}


class After(Method):
    """Stands behind EWC and checks the gradient that EWC has added against autograd of the quadratic.

    Attributes:
        terms: client -> one (Fisher, anchor) per task that it has one for, in the server's coordinates.
        checked: how many clients' steps had a penalty.
    """

    def __init__(self, ewc: EWC, before: Before) -> None:
        self.ewc, self.before = ewc, before
        self.terms: dict[int, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {}
        self.checked = self.free = 0

    def end_task(self, plan: RoundPlan) -> None:
        federation = self.context._federation
        clients = federation.data.members[plan.task].tolist()
        fishers, models = {}, {}
        for client in clients:
            kept = {n: v[0] for n, v in federation.model.personal_state((client,)).items()}
            models[client] = {n: t.detach().clone() for n, t in {**federation.model.state_tensors(), **kept}.items()}
            fishers[client] = fisher_of(federation, plan.task, client, models[client])
            self.terms.setdefault(client, []).append((fishers[client], models[client]))

    def penalty_of(self, client: int, parameters: dict[str, Tensor]) -> Tensor:
        """The penalty of one client's parameters, in the server's coordinates."""
        terms = self.terms.get(client, [])
        total = torch.zeros((), dtype=torch.float64)
        for age, (fisher, anchor) in enumerate(reversed(terms)):
            factor = 1.0
            if self.ewc.consolidation == "online":
                factor, anchor = self.ewc.gamma**age, terms[-1][1]
            for name, f in fisher.items():
                total = total + factor * (f * (parameters[name] - anchor[name]) ** 2).sum()
        return (0.5 if self.ewc.half else 1.0) * self.ewc.strength * total

    def adjust_gradients(self, cohort: Cohort) -> None:
        for row, client in enumerate(cohort.clients):
            leaves = {n: p[row].detach().clone().requires_grad_() for n, p in cohort.parameters.items()}
            with torch.enable_grad():
                value = self.penalty_of(client, leaves)
            wanted = dict.fromkeys(leaves, 0.0)
            if value.requires_grad:
                found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
                wanted = {n: 0.0 if g is None else g for n, g in zip(leaves, found, strict=True)}
                self.checked += value.item() > 1e-6
            else:
                self.free += 1
            for name, gradient in cohort.gradients.items():
                added = gradient[row] - self.before.gradients[name][row]
                expected = torch.zeros_like(added) + wanted[name]
                torch.testing.assert_close(added, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def check(ewc: EWC, data: FederatedDataModule | None = None, network: NetworkFactory = mlp, **others: Method) -> After:
    before = Before()
    after = After(ewc, before)
    run({**others, "before": before, "ewc": ewc, "after": after}, data, network)
    assert after.checked > 10
    return after


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"half": False, "fisher_batch_size": 3},
        {"consolidation": "online", "gamma": 0.7},
        {"consolidation": "online"},
    ],
    ids=lambda options: ", ".join(map(str, options)) or "defaults",
)
def test_it_adds_the_gradient_of_the_quadratic_over_all_tasks(options: dict[str, Any]) -> None:
    check(EWC(5.0, **options))


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_it_does_so_where_tasks_have_outputs_of_their_own(scenario: Any) -> None:
    data = data_of(stream=split(3, classes=6, train=150), scenario=scenario)
    after = check(EWC(5.0), data)
    others = ~data.outputs.own[0]
    first = [after.terms[client][0][0]["head.weight"] for client in data.members[0]]
    assert all((f[others] == 0).all() == (scenario == "task") for f in first)


def test_personal_parameters_are_held_to_their_clients_own_values() -> None:
    ewc, head = EWC(5.0), PersonalLayers(["head.*"])
    check(ewc, None, mlp, personal=head)
    kept = ewc.context.clients.get("ewc", 0)
    assert kept is not None
    assert {n.split(" ")[1].split(".")[0] for n in kept} == {"head", "layers"}


def test_with_fot_behind_it() -> None:
    check(EWC(5.0), fot=FOT(0.9))


def test_a_client_without_a_fisher_has_no_penalty() -> None:
    """The fifth client joins in the second task and has no Fisher before."""
    assert check(EWC(5.0)).free > 0


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
@pytest.mark.parametrize("kind", ["expected", "weighted"])
def test_every_clients_fisher_is_that_of_the_model_it_computes_with(batchnorm: Any, kind: Any) -> None:
    """BatchNorm normalises by the global running statistics, the client's own, or the batch's."""
    data = data_of(tasks=2, schedule={"rounds_per_task": [2, 1]})
    models: dict[int, dict[str, Tensor]] = {}

    class Copy(Method):
        def end_task(self, plan: RoundPlan) -> None:
            for client in data.members[0].tolist() if plan.task == 0 else ():
                own = {n: v[0] for n, v in self.context.personal_state((client,)).items()}
                tensors = {**self.context.state_tensors(), **own}
                models[client] = {n: t.detach().clone() for n, t in tensors.items()}

    ewc = EWC(1.0, fisher=kind, fisher_batch_size=6)
    federation = run({"ewc": ewc, "copy": Copy()}, data, norm_net, federated={"batchnorm": batchnorm})
    assert federation.clients.holders("ewc") == data.members[0].tolist()
    for client, model in models.items():
        batches = data.client_batches(0, client, 6, torch.device("cpu"))
        expected = diagonal_fisher(federation.network, model, batches, kind, batch_statistics=batchnorm == "drop")
        kept = federation.clients.get("ewc", client)
        assert kept is not None
        assert_close({n: kept[f"curvature {n}"] for n in expected}, expected)
        assert_close({n: kept[f"anchor {n}"] for n in expected}, {n: model[n] for n in expected})


# Effects of the penalty.


class ConstantGradients(Method):
    """Set every gradient to 0.01 from the second task on, before the next method adds its own."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values() if cohort.task > 0 else ():
            gradient.fill_(0.01)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_one_client_walks_down_the_quadratic(limit: float | None, half: bool) -> None:
    """Gradient descent with a constant pull g has a closed form, whose distance falls with the curvature S:

    ``w_n = A - g / S (1 - (1 - lr S)^n)``, where ``limit`` bounds ``lr S``. Without the factor 1/2 of eq 3, half
    the strength gives the same run.
    """
    data = tiny_data(permuted(2), num_clients=1, schedule={"rounds_per_task": [3, 4], "clients_per_round": 1})
    strength, lr = 30.0, 0.1
    ewc = EWC(strength if half else strength / 2, half, limit=limit)
    anchors: dict[str, Tensor] = {}

    class Copy(Method):
        def end_task(self, plan: RoundPlan) -> None:
            if plan.task == 0:
                anchors.update(weights(self.context))

    federation = run({"constant": ConstantGradients(), "ewc": ewc, "copy": Copy()}, data)
    steps = 4 * -(-len(data.indices[1][0]) // 8)
    fisher = fisher_of(federation, 0, 0, anchors)
    found = weights(federation)
    moved, curvature, limited = [], [], 0
    most = math.inf if limit is None else limit / lr
    for name, anchor in anchors.items():
        s = (strength * fisher[name]).clamp(max=most)
        limited += int((strength * fisher[name] > most).sum())
        free = s < 1e-9  # dead units: no curvature, nothing holds them
        way = torch.where(free, lr * steps, (1 - (1 - lr * s) ** steps) / s.clamp(min=1e-9))
        torch.testing.assert_close(found[name], anchor - 0.01 * way, rtol=1e-9, atol=1e-11)
        moved.append((found[name] - anchor).abs().flatten())
        curvature.append(s.flatten())
    order = torch.cat(curvature).argsort()
    distances = torch.cat(moved)[order]
    assert (distances.diff() <= 1e-9).all(), "the greater the Fisher information, the shorter the way"
    assert distances[-1] < 0.8 * distances[0]
    assert (limited > 0) == (limit is not None)


def test_a_greater_strength_keeps_the_model_nearer_to_the_old_one() -> None:
    def way(strength: float) -> float:
        models: list[dict[str, Tensor]] = []

        class Copy(Method):
            def end_task(self, plan: RoundPlan) -> None:
                models.append(weights(self.context))

        run({"ewc": EWC(strength), "copy": Copy()}, data_of(tasks=2))
        return float(sum((models[1][n] - models[0][n]).square().sum() for n in models[0]))

    ways = [way(strength) for strength in (0.0, 2.0, 8.0)]
    assert ways[0] > 1.01 * ways[1] > 1.01**2 * ways[2]


# The federation.


def test_bytes_are_counted() -> None:
    """Two extra rounds with four and five clients."""
    model = sum(p.numel() for p in tiny_client(data_of()).network.parameters()) * 8
    channel = run({"ewc": EWC(1.0)}).channel
    assert channel.downlink_bytes == {"model": (6 * 3 + 4 + 5) * model}
    assert channel.uplink_bytes == {"update": 6 * 3 * model}


def test_reports() -> None:
    ewc = EWC(1.0)
    federation = run({"ewc": ewc})
    model = sum(p.numel() for p in federation.network.parameters()) * 8
    rows = ewc.report().rows
    assert [(row["task"], row["clients"]) for row in rows] == [(0, 4), (1, 5)]
    curvature = [federation.clients.get("ewc", 4)]  # client 4 joined in the second task
    greatest = max(float(v.max()) for n, v in curvature[0].items() if n.startswith("curvature"))  # type: ignore[union-attr]
    assert 0 < rows[1]["fisher_mean"] < greatest <= rows[1]["fisher_max"]
    summary = ewc.report().figures
    assert summary.pop("fisher_seconds") == sum(row["fisher_seconds"] for row in rows) > 0
    assert summary == {"client_bytes": 2 * model}
    assert federation.clients.bytes() == 5 * summary["client_bytes"]


def test_the_reports_fisher_is_that_of_all_clients() -> None:
    ewc, models = EWC(1.0), Rounds()
    federation = run({"ewc": ewc}, callbacks=[models])
    members = federation.data.members[0].tolist()
    fishers = [
        torch.cat([v.flatten() for v in fisher_of(federation, 0, c, models.models[1]).values()]) for c in members
    ]
    row = ewc.report().rows[0]
    assert row["fisher_mean"] == pytest.approx(float(torch.cat(fishers).mean()), rel=1e-6)
    assert row["fisher_max"] == pytest.approx(max(float(fisher.max()) for fisher in fishers), rel=1e-6)
    assert fishers[-1].max() < row["fisher_max"]


def test_clients_that_drop_out_of_a_tasks_last_round_are_not_in_its_row() -> None:
    data = data_of(schedule={"rounds_per_task": 2, "clients_per_round": 1.0, "client_dropout": 0.5})
    federation = run({"ewc": EWC(1.0)}, data)
    rows = federation.methods["ewc"].report().rows
    there = [set(data.members[task].tolist()) - set(data.rounds.dropouts(2 * task + 1)) for task in (0, 1)]
    assert [row["clients"] for row in rows] == [len(clients) for clients in there]
    assert 0 < len(there[0]) < len(data.members[0])
    assert federation.clients.holders("ewc") == sorted(set.union(*there))


def test_nothing_is_computed_after_the_last_task_or_without_strength() -> None:
    single = run({"ewc": EWC(1.0)}, data_of(tasks=1))
    idle = run({"ewc": EWC(0.0)})
    for federation in (single, idle):
        assert federation.clients.holders("ewc") == []
        assert set(federation.channel.downlink_bytes) == {"model"}
        assert federation.methods["ewc"].report().rows == []
    assert all(torch.equal(value, weights(idle)[name]) for name, value in weights(run({})).items())


def test_drawn_labels_come_from_a_generator_of_each_client() -> None:
    """The generator is seeded by task and client."""
    options = {"tasks": 2, "schedule": {"rounds_per_task": [2, 1]}}
    federation = run({"ewc": EWC(1.0, fisher="sampled")}, data_of(**options))
    every = federation.clients
    for client in every.holders("ewc"):
        kept = every.get("ewc", client) or {}
        model = {n.removeprefix("anchor "): value for n, value in kept.items() if n.startswith("anchor ")}
        batches = federation.data.client_batches(0, client, 1000, torch.device("cpu"))
        generator = torch_generator(federation.data.seed, "fisher labels", 0, client)
        expected = diagonal_fisher(federation.network, model, batches, "sampled", generator=generator)
        assert_close({n: kept[f"curvature {n}"] for n in expected}, expected)


# What is refused.


def test_a_limit_needs_steps_along_the_gradient() -> None:
    data = tiny_data(permuted(2))
    with pytest.raises(ConfigError, match=r"methods\.ewc\.limit = 1\.0 .*null while the optimizer is Adam"):
        fit(tiny_client(data, double(mlp), ADAM, {"ewc": EWC(limit=1.0)}), data)
    assert fit(tiny_client(data, double(mlp), ADAM, {"ewc": EWC()}), data).finished


class RowsInTurn(Network):
    """Reads an image row by row, the rows first, with a recurrent layer."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.rows = nn.Linear(input_shape[0] * input_shape[2], 4)
        self.recurrent = nn.GRU(4, 4)
        self.head = nn.Linear(4, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        last: Tensor = self.recurrent(self.rows(x.permute(2, 0, 1, 3).flatten(2)))[0][-1]
        return last


class TrainedOnly(RowsInTurn):
    """Has no gradients in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x).detach()


@pytest.mark.filterwarnings("ignore:the Fisher information of")
def test_a_recurrent_network_that_reads_sequences_first() -> None:
    check(EWC(50.0), data_of(1, tasks=2), RowsInTurn)


@pytest.mark.filterwarnings("ignore:the Fisher information of")
@pytest.mark.parametrize("method", [EWC, FedCurv])
def test_a_network_without_gradients_in_evaluation_mode_is_refused(method: type[EWC | FedCurv]) -> None:
    with pytest.raises(ConfigError, match=r"outputs without gradients.*methods\.m\.fisher") as caught:
        run({"m": method(1.0)}, data_of(1), TrainedOnly)
    assert caught.value.key == "model.network"


class Overflow(Method):
    """After the first task, one client's own head is infinite."""

    def end_task(self, plan: RoundPlan) -> None:
        own = self.context.personal_state((0,))
        own["head.bias"][0, 0] = torch.inf
        self.context.clients.scatter("model", [0], own)


def test_a_client_whose_fisher_is_not_finite_is_caught() -> None:
    def methods() -> dict[str, Method]:
        return {"own": PersonalLayers(["head.*"]), "overflow": Overflow(), "ewc": EWC(1.0)}

    with pytest.raises(BadUpdate, match="client 0"):
        run(methods(), data_of(tasks=2))
    federation = run(methods(), data_of(tasks=2), federated={"on_bad_update": "skip"})
    assert 0 not in federation.clients.holders("ewc")
    assert federation.clients.holders("ewc") == [1, 2, 3]


def test_a_parameter_without_elements_has_no_curvature() -> None:
    class Empty(MLP):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, hidden=[5])
            self.none = nn.Parameter(torch.zeros(0, 4))

    data = tiny_data(schedule={"rounds_per_task": 1})
    (row,) = fit(tiny_client(data, Empty, methods={"ewc": EWC(1.0)}), data).methods["ewc"].report().rows
    assert row["fisher_max"] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_has_the_same_centres(dtype: torch.dtype) -> None:
    """Two tasks with equal Fishers have their centre in the middle of their models."""
    fisher = {"w": torch.tensor([1e-3, 2e-5, 1e-5]).to(dtype)}
    models = [{"w": torch.full((3,), float(number), dtype=dtype)} for number in (0, 1)]
    _, centre = EWC()._consolidated(fisher, models[0], fisher, models[1])
    torch.testing.assert_close(centre["w"].double(), torch.full((3,), 0.5).double(), rtol=2e-2, atol=0)


def test_a_fisher_that_is_not_finite_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``on_bad_update: skip`` it is not kept either."""
    ewc = EWC()
    computed = EWC._fisher

    def of_client(self: EWC, task: int, client: int, moment: int) -> Any:
        fisher, model = computed(self, task, client, moment)
        return (
            ({n: torch.full_like(v, torch.inf) for n, v in fisher.items()}, model) if client == 1 else (fisher, model)
        )

    monkeypatch.setattr(EWC, "_fisher", of_client)
    data = tiny_data()
    fit(tiny_client(data, methods={"ewc": ewc}), data, {"on_bad_update": "skip"})
    assert all(math.isfinite(row["fisher_mean"]) and math.isfinite(row["fisher_max"]) for row in ewc.report().rows)
    assert ewc.report().rows
