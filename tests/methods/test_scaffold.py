"""SCAFFOLD against the algorithm written out, one client after another with autograd, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.close import assert_close, farthest
from support.naive import local_batches, plain_network, task_loss, used_outputs
from support.tiny import (
    NetworkFactory,
    Rounds,
    StridedNet,
    double,
    fit,
    five_unequal,
    mlp,
    norm_net,
    permuted,
    runs_in_double,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn
from torch.func import functional_call

from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.partitions import IID, Shards
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import ER, SCAFFOLD, FedProx, Method, PersonalLayers
from cfl.methods.task_free import task_free_cohort
from cfl.models import Network
from cfl.runtime.errors import BadUpdate, ConfigError

LR = 0.1
Tensors = dict[str, Tensor]
Key = tuple[int, int]


def data_of(width: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, three per round, two tasks of three rounds with two local epochs."""
    return five_unequal(width=width, schedule={"local_epochs": 2, **options.pop("schedule", {})}, **options)


run = runs_in_double(data_of)


def variates(federation: Federation) -> dict[int, Tensors]:
    """The variates that clients keep, by client."""
    held = federation.clients
    return {client: held.get("scaffold", client) or {} for client in held.holders("scaffold")}


def server_variate(federation: Federation) -> Tensors:
    (method,) = (m for m in federation.methods.values() if isinstance(m, SCAFFOLD))
    return method.variate


# The algorithm, written out.


def same(task: int, tensors: Tensors) -> Tensors:
    return tensors


@dataclass
class Naive:
    """SCAFFOLD as in the paper. Only data, sampled clients and the order of samples are taken from the package.

    Attributes:
        variant: the option.
        weight_decay: of local SGD.
        clip: greatest norm of a local step's corrected gradient.
        mu: strength of a proximal term in the loss.
        by_samples: whether samples weight the clients in the mean of the models.
        personal: which parameters stay on their client.
        unheard: (round, client) whose messages do not count.
        global_model, c, c_i: the results of :meth:`run`.
    """

    variant: str = "II"
    weight_decay: float = 0.0
    clip: float | None = None
    mu: float = 0.0
    by_samples: bool = False
    personal: Callable[[str], bool] = lambda name: False
    unheard: Collection[Key] = ()
    global_model: Tensors = field(default_factory=dict)
    c: Tensors = field(default_factory=dict)
    c_i: dict[int, Tensors] = field(default_factory=dict)

    def run(self, data: FederatedDataModule, make: NetworkFactory = mlp) -> Naive:
        start = tiny_client(data, double(make)).network.state_dict()
        network = plain_network(data, double(make), start)
        w = {n: t.clone() for n, t in start.items()}
        own: dict[int, Tensors] = {}
        names = [n for n, _ in network.named_parameters() if not self.personal(n)]
        zeros = {n: torch.zeros_like(w[n]) for n in names}
        self.c, self.c_i = dict(zeros), {}
        for number in range(data.num_rounds):
            plan = data.rounds.round(number)
            changes, models = [], []
            for client in plan.clients:
                received = {**w, **own.get(client, {})}
                c_i = self.c_i.get(client, zeros)
                trained, fresh = self._client(copy.deepcopy(network), data, plan, client, received, c_i)
                if (number, client) in self.unheard:
                    continue
                own[client] = {n: trained[n] for n, _ in network.named_parameters() if self.personal(n)}
                self.c_i[client] = fresh
                changes.append({n: fresh[n] - c_i[n] for n in names})
                models.append((float(len(data.indices[plan.task][client])) if self.by_samples else 1.0, trained))
            total = sum(weight for weight, _ in models)
            for n, value in w.items():
                if not self.personal(n):
                    mean = sum(weight * trained[n].double() for weight, trained in models) / total
                    w[n] = mean.to(value.dtype) if value.is_floating_point() else mean.round().to(value.dtype)
            self.c = {n: v + sum(change[n] for change in changes) / data.num_clients for n, v in self.c.items()}
        self.global_model = w
        return self

    def _client(
        self,
        network: nn.Module,
        data: FederatedDataModule,
        plan: RoundPlan,
        client: int,
        received: Tensors,
        c_i: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """The trained model and the new variate."""
        start, c = received, self.c
        outputs = torch.zeros(data.num_outputs, dtype=torch.bool)
        outputs[used_outputs(data, plan.task)] = True
        used = {n: outputs.view(-1, *[1] * (v.ndim - 1)) if n.startswith("head.") else True for n, v in c.items()}
        fresh = {}
        if self.variant == "I":
            gradients = self._gradients(copy.deepcopy(network), data, plan.task, client, start)
            fresh = {n: gradients[n] for n in c}
        network.load_state_dict(start)
        network.train()
        steps = 0
        for x, y in local_batches(data, plan, client):
            loss = task_loss(data, plan.task, network(x), y)
            loss = loss + self.mu / 2 * sum(((p - start[n]) ** 2).sum() for n, p in network.named_parameters())
            parameters = dict(network.named_parameters())
            g = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
            g = {n: v - (c_i[n] - c[n]) * used[n] if n in c else v for n, v in g.items()}
            if self.clip is not None:
                norm = sum(v.square().sum() for v in g.values()) ** 0.5
                g = {n: v * min(1.0, self.clip / float(norm + 1e-6)) for n, v in g.items()}
            with torch.no_grad():
                for n, p in parameters.items():
                    p -= LR * (g[n] + self.weight_decay * p) * used.get(n, True)
            steps += 1
        trained = {n: t.detach().clone() for n, t in network.state_dict().items()}
        if self.variant == "II":
            fresh = {n: c_i[n] - c[n] + (start[n] - trained[n]) / (steps * LR) for n in c}
        fresh = {n: torch.where(torch.as_tensor(used[n]), v, c_i[n]) for n, v in fresh.items()}
        return trained, fresh

    @staticmethod
    def _gradients(network: nn.Module, data: FederatedDataModule, task: int, client: int, at: Tensors) -> Tensors:
        """Gradients of the mean loss over a client's samples, in batches of the stored order."""
        network.load_state_dict(at)
        network.train()
        indices = data.indices[task][client]
        for begin in range(0, len(indices), data.schedule.batch_size):
            part = indices[begin : begin + data.schedule.batch_size].tolist()
            x = data.tasks[task].transform(data.tasks[task].train.images[part])
            loss = task_loss(data, task, network(x), data.tasks[task].train.labels[part])
            (loss * len(part) / len(indices)).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}


def check(
    naive: Naive,
    methods: Mapping[str, Method],
    of_data: Mapping[str, Any] | None = None,
    network: NetworkFactory = mlp,
    atol: float = 1e-10,
    **options: Any,
) -> Federation:
    """Check that model, ``c`` and every ``c_i`` at the end of a run are those of the algorithm written out."""
    of_data = dict(of_data or {})
    naive.run(data_of(**copy.deepcopy(of_data)), network)
    federation = run(dict(methods), data_of(**of_data), network, **options)
    shared = set(federation.model.shared_parameters) | set(federation.model.shared_buffers)
    assert_close(
        {n: v for n, v in weights(federation).items() if n in shared},
        {n: v for n, v in naive.global_model.items() if n in shared},
        atol,
    )
    assert_close(server_variate(federation), naive.c, atol)
    found = variates(federation)
    assert set(found) == set(naive.c_i)
    for client, expected in naive.c_i.items():
        assert_close(found[client], expected, atol)
    return federation


both = pytest.mark.parametrize("variant", ["II", "I"])


@both
@pytest.mark.parametrize("width", [1, 2, 3])
def test_it_is_the_algorithm_written_out(width: int, variant: Any) -> None:
    """Clients have unequal sizes, and some of them are sampled."""
    data = data_of()
    federation = check(Naive(variant), {"scaffold": SCAFFOLD(variant)}, {"width": width})
    assert len({len(own) for own in data.indices[0].values()}) > 2
    assert farthest(weights(run({})), weights(federation)) > 1e-2


@both
@pytest.mark.parametrize("engine", ["vmap", "workers"])
@pytest.mark.parametrize("network", [mlp, norm_net, StridedNet], ids=["mlp", "batchnorm", "chain"])
def test_engines_and_networks(network: NetworkFactory, engine: Any, variant: Any) -> None:
    """In option I, BatchNorm uses the statistics of the client's batches, as in local steps."""
    of_data = {"partition": IID(), "stream": permuted(2, train=90)}
    # BatchNorm amplifies rounding in batches of two samples.
    check(Naive(variant), {"scaffold": SCAFFOLD(variant)}, of_data, network, 1e-7, engine=EngineOptions(engine))


@both
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_outputs_of_other_tasks_are_left_alone(scenario: Any, variant: Any) -> None:
    """Outputs outside the loss and their variates do not move, also with weight decay."""
    class_loss = "seen" if scenario == "class" else "all"
    of_data = {"stream": split(2, classes=4, train=120), "scenario": scenario, "class_loss": class_loss}
    decayed = partial(torch.optim.SGD, lr=LR, weight_decay=0.05)
    federation = check(Naive(variant, weight_decay=0.05), {"scaffold": SCAFFOLD(variant)}, of_data, optimizer=decayed)
    first = run(
        {"scaffold": SCAFFOLD(variant)}, data_of(**of_data, schedule={"rounds_per_task": [3, 1]}), optimizer=decayed
    )
    rows = federation.data.outputs.own[0]
    then, now = server_variate(first)["head.weight"][rows], server_variate(federation)["head.weight"][rows]
    assert then.abs().max() > 1e-3
    assert torch.equal(then, now) == (scenario == "task")


@both
@pytest.mark.parametrize("personal", ["head.*", "layers.0.*"])
def test_personal_parameters_have_no_variate(personal: str, variant: Any) -> None:
    def stays(name: str) -> bool:
        return name.startswith(personal[:-1])

    naive = Naive(variant, personal=stays)
    federation = check(naive, {"own": PersonalLayers([personal]), "scaffold": SCAFFOLD(variant)})
    assert not any(stays(name) for name in server_variate(federation))


@both
def test_the_mean_of_variates_is_uniform_whatever_clients_weigh(variant: Any) -> None:
    check(Naive(variant, by_samples=True), {"scaffold": SCAFFOLD(variant)}, federated={"client_weighting": "samples"})


def test_the_correction_comes_before_clipping() -> None:
    plain, clipped = Naive().run(data_of()), Naive(clip=0.3)
    check(clipped, {"scaffold": SCAFFOLD()}, gradient_clip_val=0.3)
    assert farthest(plain.global_model, clipped.global_model) > 1e-2


def test_option_two_takes_in_what_other_methods_add() -> None:
    """In either order of the methods."""
    check(Naive(mu=2.0), {"prox": FedProx(2.0), "scaffold": SCAFFOLD()})
    check(Naive(mu=2.0), {"scaffold": SCAFFOLD(), "prox": FedProx(2.0)})


# Known results.


@both
def test_one_client_is_plain_sgd(variant: Any) -> None:
    """The client's variate equals the server's, so that there is no correction."""
    of_data = {"num_clients": 1, "partition": IID(), "schedule": {"clients_per_round": 1}}
    federation = run({"scaffold": SCAFFOLD(variant)}, data_of(**of_data))
    assert_close(weights(federation), weights(run({}, data_of(**of_data))), 1e-13)
    assert max(float(v.abs().max()) for v in server_variate(federation).values()) > 1e-2


def test_with_one_local_step_it_is_gradient_descent_on_all_samples() -> None:
    """Clients are equal and all take part, so that corrections cancel in the mean."""
    of_data = {
        "num_clients": 4,
        "partition": IID(),
        "stream": permuted(1),
        "schedule": {"rounds_per_task": 6, "clients_per_round": 1.0, "local_epochs": 1, "batch_size": 20},
    }
    data = data_of(**of_data)
    network = plain_network(data, double(mlp), tiny_client(data, double(mlp)).network.state_dict())
    task = data.tasks[0]
    assert {len(own) for own in data.indices[0].values()} == {20}
    optimizer = torch.optim.SGD(network.parameters(), LR)
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(network(task.transform(task.train.images)), task.train.labels).backward()
        optimizer.step()
    federation = run({"scaffold": SCAFFOLD()}, data)
    assert_close(weights(federation), network.state_dict(), 1e-12)
    # The clients' gradients are not alike, so there was something to cancel.
    assert max(float(own["head.weight"].abs().max()) for own in variates(federation).values()) > 1e-2


@both
def test_the_servers_variate_is_the_mean_of_all_clients(variant: Any) -> None:
    """The mean is compared after every round. Clients without a variate count as zero."""
    data = data_of(participation=Joining(3, 2), schedule={"clients_per_round": 2})
    seen: list[int] = []

    class Watch(Method):
        def end_round(self, plan: RoundPlan) -> None:
            found = variates(self.context._federation)
            seen.append(len(found))
            for name, value in server_variate(self.context._federation).items():
                mean = sum(own[name] for own in found.values()) / 5
                torch.testing.assert_close(value, mean, rtol=0, atol=1e-14)

    federation = run({"scaffold": SCAFFOLD(variant), "watch": Watch()}, data)
    assert len(seen) == 6
    assert seen[0] == 2
    assert seen[-1] > 3
    assert max(float(v.abs().max()) for v in server_variate(federation).values()) > 1e-2


class Logistic(Network):
    """Multinomial logistic regression: with weight decay, a strongly convex problem."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.head = nn.Linear(torch.Size(input_shape).numel(), num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@both
def test_clients_that_drift_apart_still_end_at_the_common_optimum(variant: Any) -> None:
    """With two classes per client and eight full-batch steps a round, averaging ends far from the optimum."""
    of_data = {
        "num_clients": 4,
        "partition": Shards(2),
        "stream": permuted(1),
        "schedule": {"rounds_per_task": 20, "clients_per_round": 1.0, "local_epochs": 8, "batch_size": 100},
    }
    data = data_of(**of_data)
    decay = 0.5
    network = plain_network(data, double(Logistic), tiny_client(data, double(Logistic)).network.state_dict())
    task = data.tasks[0]
    x, y = task.transform(task.train.images), task.train.labels
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16)

    def objective() -> Tensor:
        optimizer.zero_grad()
        per_client = [F.cross_entropy(network(x[own]), y[own]) for own in data.indices[0].values()]
        loss = sum(per_client) / 4 + decay / 2 * sum(p.square().sum() for p in network.parameters())
        loss.backward()
        return loss

    optimizer.step(objective)
    optimum = dict(network.state_dict())
    decayed = partial(torch.optim.SGD, lr=LR, weight_decay=decay)
    averaging, scaffold = (
        farthest(weights(run(methods, data_of(**of_data), Logistic, decayed)), optimum)
        for methods in ({}, {"scaffold": SCAFFOLD(variant)})
    )
    assert averaging > 0.02
    assert scaffold < 0.01 * averaging


class Plain(Method):
    """Stands before SCAFFOLD and records each client's mean gradient over its local steps."""

    def __init__(self) -> None:
        self.means: dict[int, Tensors] = {}

    def start_clients(self, cohort: Cohort) -> None:
        self.sums = {n: torch.zeros_like(p) for n, p in cohort.parameters.items()}

    def adjust_gradients(self, cohort: Cohort) -> None:
        for name, gradient in cohort.gradients.items():
            self.sums[name] += gradient

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        for p in positions:
            self.means[cohort.clients[p]] = {n: s[p] / cohort.steps for n, s in self.sums.items()}


def test_option_two_is_the_mean_gradient_where_replay_brings_outputs_in_late() -> None:
    """An earlier task's output is in the loss from the first step that replays a sample of it."""
    late = 0

    class Watch(Method):
        def start_clients(self, cohort: Cohort) -> None:
            assert cohort.used_outputs is not None
            self.at_first = cohort.used_outputs.clone()

        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            nonlocal late
            for p in positions:
                client = cohort.clients[p]
                found, used = self.context.clients.get("scaffold", client), cohort.used_outputs
                assert found is not None
                assert used is not None
                late += int((used[p] & ~self.at_first[p]).sum()) if client in before else 0
                for name, mean in plain.means[client].items():
                    kept = before.get(client, {}).get(name, torch.zeros_like(mean))
                    rows = used[p].view(-1, *[1] * (mean.ndim - 1)) if name.startswith("head.") else torch.tensor(True)
                    expected = torch.where(rows, mean, kept)
                    torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)
                before[client] = found

    plain, before = Plain(), dict[int, Tensors]()
    data = data_of(
        stream=split(3, classes=6, train=150),
        scenario="task",
        schedule={"rounds_per_task": 2, "clients_per_round": 1.0},
    )
    er = ER(4, per_task=False, update="step", batch_size=1)
    run({"er": er, "plain": plain, "scaffold": SCAFFOLD(), "watch": Watch()}, data)
    assert late > 10


# The federation.


def test_bytes_are_counted() -> None:
    """Both directions have twice the bytes of federated averaging."""
    federation = run({"scaffold": SCAFFOLD()})
    model = sum(p.numel() for p in federation.network.parameters()) * 8
    assert federation.channel.downlink_bytes == {"model": 6 * 3 * model, "scaffold": 6 * 3 * model}
    assert federation.channel.uplink_bytes == {"update": 6 * 3 * model, "scaffold": 6 * 3 * model}
    assert federation.client_storage() == model
    assert federation.clients.bytes() == len(variates(federation)) * model
    partly = run({"own": PersonalLayers(["head.*"]), "scaffold": SCAFFOLD()}, None, norm_net).channel
    assert partly.downlink_bytes["scaffold"] == 6 * 3 * 8 * sum(
        p.numel() for n, p in federation_network(norm_net).named_parameters() if not n.startswith("head.")
    )


def federation_network(make: NetworkFactory) -> nn.Module:
    return tiny_client(data_of(), double(make)).network


def test_the_first_round_is_federated_averaging_at_full_speed() -> None:
    """There is nothing to correct yet, so the engine fuses SGD's step. From the second round on it does not."""
    models: dict[str, Rounds] = {"plain": Rounds(), "scaffold": Rounds()}
    left: list[bool] = []

    class Watch(Method):
        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            left.append(bool(cohort.gradients))

    one = {"rounds_per_task": 2, "clients_per_round": 1.0, "cohort_width": 5}
    for name, methods in (("plain", {}), ("scaffold", {"scaffold": SCAFFOLD(), "watch": Watch()})):
        data = tiny_data(permuted(1), schedule=one)
        engine = EngineOptions("workers", 2, stack=1)
        client = tiny_client(data, mlp, sgd, methods, engine)  # type: ignore[arg-type]
        fit(client, data, callbacks=[models[name]])
    first, second = (farthest(a, b) for a, b in zip(*(watched.models for watched in models.values()), strict=True))
    assert first == 0
    assert second > 1e-3
    assert left == [False, True]


class Breaks(Method):
    """Sets one tensor of one client to infinity in its last step of round 4."""

    def __init__(self, name: str) -> None:
        self.tensor = name

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        self.closing = batch.closes
        return batch

    def adjust_gradients(self, cohort: Cohort) -> None:
        for p in self.closing:
            if cohort.round == 4 and cohort.clients[p] == self.context.plan(4).clients[0]:
                (cohort.parameters | cohort.buffers)[self.tensor].data[p] = torch.inf


@both
@pytest.mark.parametrize("name", ["conv.weight", "conv_norm.running_mean", "head.bias"])
def test_a_client_that_is_left_out_keeps_its_variate(name: str, variant: Any) -> None:
    """The infinity is in a shared parameter, in a running statistic or in a personal parameter."""

    own = name.startswith("head.")  # without these, a client would keep its head even if its update is refused

    def personal(of: str) -> bool:
        return own and of.startswith("head.")

    of_data = {"partition": IID(), "schedule": {"clients_per_round": 4}}
    client = data_of(**of_data).rounds.round(4).clients[0]
    assert any(client in data_of(**of_data).rounds.round(r).clients for r in range(4)), "it has one before"
    naive = Naive(variant, personal=personal, unheard={(4, client)})

    def methods() -> dict[str, Method]:
        layers: list[str] = ["head.*"] if own else []
        return {"breaks": Breaks(name), "own": PersonalLayers(layers), "scaffold": SCAFFOLD(variant)}

    federation = check(naive, methods(), of_data, norm_net, 1e-7, federated={"on_bad_update": "skip"})
    assert federation.channel.skipped == [(4, 1, client)]
    with pytest.raises(BadUpdate, match=f"client {client} trained to NaN or infinity in round 4"):
        run(methods(), data_of(**of_data), norm_net)


@both
def test_a_variate_that_is_not_finite_is_left_out_alone(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's model is finite and still counts."""
    data = data_of(partition=IID(), schedule={"clients_per_round": 4})
    client = data.rounds.round(4).clients[0]

    def broken(of: Any) -> Any:
        def found(self: SCAFFOLD, cohort: Cohort, positions: Sequence[int]) -> dict[str, torch.Tensor]:
            gradients: dict[str, torch.Tensor] = of(self, cohort, positions)
            for row, position in enumerate(positions):
                if cohort.round == 4 and cohort.clients[position] == client:
                    gradients["head.bias"][row] = torch.nan
            return gradients

        return found

    for name in ("_gradients", "_mean_gradients"):
        monkeypatch.setattr(SCAFFOLD, name, broken(getattr(SCAFFOLD, name)))
    federation = run({"scaffold": SCAFFOLD(variant)}, data, norm_net, federated={"on_bad_update": "skip"})
    assert federation.channel.skipped == []
    assert federation.channel.skipped_messages == [(4, "scaffold", client)]


def dropping(rate: float) -> NetworkFactory:
    return partial(StridedNet, dropout=rate)


def test_option_one_has_dropout_masks_of_its_own() -> None:
    """Masks depend on neither the cohort width nor the engine. Variates differ from those without dropout."""
    found = [
        run({"scaffold": SCAFFOLD("I")}, data_of(width), dropping(0.5), engine=EngineOptions(engine))  # type: ignore[arg-type]
        for width, engine in ((1, "vmap"), (3, "vmap"), (2, "workers"))
    ]
    for other in found[1:]:
        assert_close(weights(other), weights(found[0]), 1e-9)
        assert_close(server_variate(other), server_variate(found[0]), 1e-9)
    once = {"rounds_per_task": [1, 1]}
    kept = [
        variates(run({"scaffold": SCAFFOLD("I")}, data_of(schedule=once, stream=permuted(2)), dropping(rate)))
        for rate in (0.0, 0.5)
    ]
    assert all(farthest(kept[0][client], kept[1][client]) > 1e-3 for client in kept[0])


def test_option_one_is_right_on_average_over_dropout_masks() -> None:
    """Over many draws the mean of its gradients is that of gradients under torch's own dropout."""
    data = data_of(stream=permuted(1), schedule={"rounds_per_task": 1, "clients_per_round": 1.0})
    method = SCAFFOLD("I")
    federation = run({"scaffold": method}, data, dropping(0.25))
    cohort = Cohort(federation.network, 1)
    parameters, buffers = dict(federation.network.named_parameters()), dict(federation.network.named_buffers())
    federation.network.train()
    (x, y), *_ = data.client_batches(0, 0, 1000, torch.device("cpu"))
    draws = 400

    def mean(gradient_of: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        drawn = torch.stack([gradient_of(i) for i in range(draws)])
        return drawn.mean(0), drawn.std(0) / draws**0.5

    def ours(draw: int) -> Tensor:
        cohort.open([0], [len(y)], 0, draw, {**parameters, **buffers}, {})
        return method._gradients(task_free_cohort(cohort), [0])["fc.weight"][0]

    def torchs(draw: int) -> Tensor:
        leaf = parameters["fc.weight"].detach().clone().requires_grad_()
        loss = F.cross_entropy(functional_call(federation.network, {"fc.weight": leaf}, (x,)), y)
        return torch.autograd.grad(loss, leaf)[0]

    torch.manual_seed(0)
    (a, error), (b, other) = mean(ours), mean(torchs)
    assert ((a - b).abs() <= 5 * (error + other) + 1e-12).all()
    assert float(error.max()) > 1e-6


# What is refused.


OTHERS = {
    "momentum=0.9": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "momentum=0.5": partial(torch.optim.SGD, lr=0.01, momentum=0.5, nesterov=True),
    "maximize=True": partial(torch.optim.SGD, lr=1e-6, maximize=True),
    "Adam": partial(torch.optim.Adam, lr=0.001),
}


@both
@pytest.mark.parametrize("named", OTHERS)
def test_other_optimizers_are_refused_before_training_unless_asked_for(named: str, variant: Any) -> None:
    with pytest.raises(ConfigError, match=rf"model\.optimizer.*{named}.*any_optimizer=true"):
        run({"scaffold": SCAFFOLD(variant)}, optimizer=OTHERS[named])
    with pytest.warns(UserWarning, match=rf"SCAFFOLD with .*{named}") as caught:
        assert run({"scaffold": SCAFFOLD(variant, any_optimizer=True)}, optimizer=OTHERS[named]).finished
    (only,) = (w for w in caught if "SCAFFOLD" in str(w.message))
    assert ("is no gradient" in str(only.message)) == (variant == "II")


def test_plain_sgd_is_used_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*SCAFFOLD")
        run({"scaffold": SCAFFOLD(any_optimizer=True)}, optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.1))


def test_a_learning_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.optimizer.*lr=0\.0"):
        run({"scaffold": SCAFFOLD()}, optimizer=partial(torch.optim.SGD, lr=0.0))


def test_it_is_refused_where_nothing_is_exchanged() -> None:
    with pytest.raises(ConfigError, match="where all parameters stay on their client"):
        run({"own": PersonalLayers(), "scaffold": SCAFFOLD()})


def test_option_one_is_refused_where_clients_train_on_other_tasks_too() -> None:
    with pytest.raises(ConfigError, match=r"data\.exposure = 'cumulative'.*variant is I"):
        run({"scaffold": SCAFFOLD("I")}, data_of(exposure="cumulative"))
    assert run({"scaffold": SCAFFOLD("II")}, data_of(exposure="cumulative")).finished


def test_option_two_is_refused_beside_learning_rates_of_clients() -> None:
    """Its variates would be gradients times those rates. Option I looks at no update: its variates are the same."""

    class Halves(Method):
        def step_factors(self, cohort: Cohort) -> Tensor:
            return torch.full((len(cohort.clients),), 0.5, dtype=torch.float64)

    with pytest.raises(ConfigError, match=r"methods = \['halves'\].*methods\.it\.variant = II"):
        run({"it": SCAFFOLD(), "halves": Halves()})
    once = {"rounds_per_task": 1}
    found = [
        run({"it": SCAFFOLD("I"), **beside}, data_of(stream=permuted(1), schedule=once)).methods["it"].variate
        for beside in ({}, {"halves": Halves()})
    ]
    assert_close(found[1], found[0])
