"""FedCurv's gradient against eq 3 written out with all clients' end points and Fishers from a loop, in float64."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.close import assert_close
from support.naive_fisher import Before, fisher_by_loop
from support.own_networks import Plain, WithoutElements
from support.tiny import (
    ConvNet,
    NetworkFactory,
    Poison,
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
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import EWC, FOT, RGO, FedCurv, Method, PersonalLayers
from cfl.methods.components.curvature.fisher import diagonal_fisher
from cfl.methods.context import Context
from cfl.methods.fedcurv import _anchor
from cfl.models.copies import networks_for_threads
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import BadUpdate, ConfigError
from cfl.training.client import Client

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
ADAM = partial(torch.optim.Adam, lr=0.01)

Share = tuple[dict[str, Tensor], dict[str, Tensor]]
"""One client's Fisher and the weights it ended with, in the server's coordinates."""


def data_of(width: int = 2, tasks: int = 2, **options: Any) -> FederatedDataModule:
    """Five unequal clients, four of them in the first task, three per round, tasks of three rounds."""
    settings = {"participation": Joining(4, 1), **options}
    return five_unequal(settings.pop("stream", permuted(tasks)), width, **settings)


run = runs_in_double(data_of)


# Eq 3, written out.


def fisher_of(
    federation: Federation, task: int, client: int, model: Mapping[str, Tensor], reduction: str
) -> dict[str, Tensor]:
    """A client's Fisher of the shared parameters by a loop, the mean or the sum over its samples."""
    total, count = fisher_by_loop(federation, task, client, model, federation.model.shared_parameters)
    return {n: value / count if reduction == "mean" else value for n, value in total.items()}


class After(Method):
    """Stands behind FedCurv, collects the clients' final weights and checks the gradient that FedCurv has added.

    Attributes:
        shares: round -> client -> its Fisher and final weights.
        checked: clients' steps with a penalty above 1e-6; ``absent``: those of clients that were not in the last round.
    """

    def __init__(self, fedcurv: FedCurv, before: Before) -> None:
        self.fedcurv, self.before = fedcurv, before
        self.shares: dict[int, dict[int, Share]] = {}
        self.checked = self.absent = 0

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        federation = self.context._federation
        ends = {n: t.clone() for n, t in cohort.rows(positions, {**cohort.parameters, **cohort.buffers}).items()}
        for row, position in enumerate(positions):
            client, end = cohort.clients[position], {n: t[row] for n, t in ends.items()}
            fisher = fisher_of(federation, cohort.task, client, end, self.fedcurv.reduction)
            shared = {n: end[n] for n in federation.model.shared_parameters}
            share = fisher, shared
            self.shares.setdefault(cohort.round, {})[client] = share

    def adjust_gradients(self, cohort: Cohort) -> None:
        others = self.shares.get(cohort.round - 1, {})
        for row, client in enumerate(cohort.clients):
            leaves = {n: p[row].detach().clone().requires_grad_() for n, p in cohort.parameters.items()}
            with torch.enable_grad():
                w = leaves
                value = torch.zeros((), dtype=torch.float64)
                for other, (fisher, end) in others.items():
                    if other != client:
                        value = value + sum(((w[n] - end[n]) * f * (w[n] - end[n])).sum() for n, f in fisher.items())
                value = self.fedcurv.strength * value
            wanted: dict[str, Any] = dict.fromkeys(leaves, 0.0)
            if value.requires_grad:
                found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
                wanted = {n: 0.0 if g is None else g for n, g in zip(leaves, found, strict=True)}
                self.checked += value.item() > 1e-6
                self.absent += client not in others
            for name, gradient in cohort.gradients.items():
                added = gradient[row] - self.before.gradients[name][row]
                expected = torch.zeros_like(added) + wanted[name]
                torch.testing.assert_close(added, expected, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def check(
    fedcurv: FedCurv,
    data: FederatedDataModule | None = None,
    network: NetworkFactory = mlp,
    optimizer: Any = sgd,
    behind: Mapping[str, Method] | None = None,
    federated: Mapping[str, Any] | None = None,
    **others: Method,
) -> After:
    before = Before()
    after = After(fedcurv, before)
    methods = {**others, "before": before, "fedcurv": fedcurv, "after": after, **(behind or {})}
    run(methods, data, network, optimizer, federated=federated)
    assert after.checked > 10
    return after


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum", "strength": 0.02}, {"fisher_batch_size": 3}], ids=lambda o: ", ".join(o) or "-"
)
def test_it_adds_the_gradient_of_eq_3(options: dict[str, Any], width: int) -> None:
    """Clients are sampled, a task ends and a client joins."""
    after = check(FedCurv(**{"strength": 2.0, **options}), data_of(width))
    assert after.absent > 10


def test_it_does_so_with_all_clients() -> None:
    data = data_of(tasks=1, participation=None, schedule={"clients_per_round": 1.0, "rounds_per_task": 4})
    assert check(FedCurv(2.0), data, federated={"client_weighting": "samples"}).absent == 0


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum and decay", "adam"])
def test_it_does_so_where_tasks_have_outputs_of_their_own(scenario: Any, optimizer: Any) -> None:
    data = data_of(stream=split(2, classes=4, train=120), scenario=scenario)
    after = check(FedCurv(2.0), data, optimizer=optimizer)
    others = ~data.outputs.own[0]
    for fisher, _ in after.shares[1].values():
        assert (fisher["head.weight"][others] == 0).all() == (scenario == "task")
    assert (after.fedcurv.u["head.weight"][others] > 0).any()


def test_it_does_so_with_batchnorm() -> None:
    """Each client's Fisher is that of its own running statistics."""
    check(FedCurv(2.0), network=norm_net)


@pytest.mark.parametrize("batchnorm", ["local", "average"])
def test_personal_parameters_have_no_part(batchnorm: Any) -> None:
    own = PersonalLayers(["fc*"])
    after = check(FedCurv(2.0), network=norm_net, own=own, federated={"batchnorm": batchnorm})
    assert {name.split(".")[0] for name in after.fedcurv.u} == {"conv", "conv_norm", "head"}


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ({"ewc": EWC(2.0)}, {}),
        ({}, {"ewc": EWC(2.0)}),
        ({}, {"fot": FOT(0.9)}),
        ({"rgo": RGO(0.5, feature_encoding=False)}, {}),
    ],
    ids=["behind EWC", "before EWC", "beside FOT", "behind RGO"],
)
def test_with_other_methods(before: dict[str, Method], behind: dict[str, Method]) -> None:
    check(FedCurv(2.0), network=ConvNet, behind=behind, **before)


class FreshSums(Method):
    """Copies u and v as they are when a round has ended."""

    def __init__(self, fedcurv: FedCurv) -> None:
        self.fedcurv = fedcurv
        self.sums: list[Share] = []

    def end_round(self, plan: RoundPlan) -> None:
        u, v = ({n: t.clone() for n, t in of.items()} for of in (self.fedcurv.u, self.fedcurv.v))
        self.sums.append((u, v))


def test_the_server_has_the_sums_over_the_last_rounds_clients() -> None:
    fedcurv = FedCurv(2.0)
    sums = FreshSums(fedcurv)
    after = check(fedcurv, behind={"sums": sums}, federated={"client_weighting": "samples"})
    for round in range(5):
        shares = after.shares[round].values()
        names = list(fedcurv.u)
        assert_close(sums.sums[round][0], {n: sum(fisher[n] for fisher, _ in shares) for n in names})  # type: ignore[misc]
        assert_close(sums.sums[round][1], {n: sum(f[n] * end[n] for f, end in shares) for n in names})  # type: ignore[misc]
    assert_close(sums.sums[5][0], sums.sums[4][0], 0.0)  # nobody needs the last round's


@pytest.mark.parametrize("batchnorm", ["average", "drop"])
@pytest.mark.parametrize("kind", ["empirical", "expected", "weighted", "sampled"])
def test_what_clients_send_is_the_fisher_at_their_own_end(batchnorm: Any, kind: Any) -> None:
    """For every kind. Drawn labels are seeded by round and client. With ``drop``, BatchNorm uses batch statistics."""
    data = data_of(tasks=1, schedule={"rounds_per_task": 2})
    ends: dict[int, dict[str, Tensor]] = {}

    class Copy(Method):
        def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
            for p in positions if cohort.round == 0 else ():
                tensors = {**cohort.parameters, **cohort.buffers}
                ends[cohort.clients[p]] = {n: t[p].detach().clone() for n, t in tensors.items()}

    methods: dict[str, Method] = {"fedcurv": FedCurv(1.0, fisher=kind, fisher_batch_size=6), "copy": Copy()}
    federation = run(methods, data, norm_net, federated={"batchnorm": batchnorm})
    assert federation.clients.holders("fedcurv") == sorted(ends)
    for client, end in ends.items():
        batches = data.client_batches(0, client, 6, torch.device("cpu"))
        generator = torch_generator(data.seed, "fedcurv labels", 0, client)
        expected = diagonal_fisher(
            federation.network, end, batches, kind, generator=generator, batch_statistics=batchnorm == "drop"
        )
        kept = federation.clients.get("fedcurv", client) or {}
        assert_close({n: kept[f"u {n}"] for n in expected}, expected)
        assert_close({n: kept[f"v {n}"] for n in expected}, {n: expected[n] * end[n] for n in expected})


# Effects of the penalty.


def test_the_first_round_and_strength_zero_are_federated_averaging() -> None:
    """The models agree bit for bit, and no additional byte is sent."""
    data = {"data": data_of(tasks=1, schedule={"rounds_per_task": 1})}
    first, plain = run({"fedcurv": FedCurv(5.0)}, **data), run({}, **data)
    idle, longer = run({"fedcurv": FedCurv(0.0)}), run({})
    for found, expected in ((first, plain), (idle, longer)):
        assert all(torch.equal(value, weights(found)[name]) for name, value in weights(expected).items())
        assert found.channel.state_dict() == expected.channel.state_dict()
        assert found.clients.holders("fedcurv") == []
        assert not found.methods["fedcurv"].report().rows
        assert found.methods["fedcurv"].client_storage() == 0
        assert found.methods["fedcurv"] not in found.methods.changing_gradients()


def test_a_greater_strength_keeps_the_clients_together() -> None:
    """The summed squared distance of clients' final weights from their mean falls as the strength grows."""

    def spread(strength: float) -> float:
        fedcurv = FedCurv(strength)
        data = data_of(tasks=1, partition=Dirichlet(0.3, 3), schedule={"rounds_per_task": 6, "local_epochs": 3})
        after = After(fedcurv, Before())
        methods: dict[str, Method] = {"fedcurv": fedcurv, "collect": Collect(after)}
        run(methods, data)
        ends = [torch.cat([t.flatten() for t in end.values()]) for _, end in after.shares[5].values()]
        return float((torch.stack(ends) - torch.stack(ends).mean(0)).square().sum())

    spreads = [spread(strength) for strength in (0.0, 0.5, 2.0)]
    assert spreads[0] > 1.05 * spreads[1] > 1.05**2 * spreads[2]


class Collect(Method):
    """Only the collecting half of :class:`After`."""

    def __init__(self, after: After) -> None:
        self.after = after

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.after.setup(context)

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self.after.finish_clients(cohort, positions)


def test_threads_do_not_matter() -> None:
    """Fishers of several clients at a time equal those of one client after another, bit for bit."""
    data, fedcurv = data_of(3, tasks=1), FedCurv(1.0, fisher="sampled")
    client = tiny_client(data, norm_net, methods={"fedcurv": fedcurv})
    fit(client, data)
    cohort = client.methods.shown(fedcurv)
    assert len(cohort.clients) == 3
    trained = cohort.rows(range(3), {**cohort.parameters, **cohort.buffers})

    def fishers(threads: int) -> dict[str, Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert len(networks_for_threads(client.network, 3)) == threads
            return fedcurv._fishers(cohort, cohort.clients, trained)
        finally:
            torch.set_num_threads(before)

    one = fishers(1)
    assert len({tuple(values) for values in one["head.bias"].tolist()}) == 3
    for threads in (2, 3):
        assert all(torch.equal(values, one[name]) for name, values in fishers(threads).items())


def test_channels_last_memory_does_not_matter() -> None:
    """Workers hold convolutions' weights with the channels last."""

    def go(engine: EngineOptions) -> Federation:
        data = data_of()
        return fit(tiny_client(data, ConvNet, sgd, {"fedcurv": FedCurv(1.0)}, engine), data)

    workers, vmap = go(EngineOptions("workers", batch_last=False)), go(EngineOptions("vmap"))
    torch.testing.assert_close(weights(workers), weights(vmap), rtol=1e-4, atol=1e-5)


# Subtracting a client's own share from the sums.


def two_clients(keep: float = 1.0, **options: Any) -> tuple[Client, FedCurv, Federation]:
    """Two clients, two rounds, float32: the sums are of the first round, the cohort still holds both clients."""
    data = tiny_data(num_clients=2, schedule={"rounds_per_task": 1, "cohort_width": 2})
    fedcurv = FedCurv(1.0, keep=keep, **options)
    client = tiny_client(data, mlp, sgd, {"fedcurv": fedcurv})
    return client, fedcurv, fit(client, data)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.05])
def test_of_two_clients_each_is_held_by_the_other_alone(keep: float) -> None:
    client, fedcurv, federation = two_clients(keep)
    assert client.require_cohort().clients == (0, 1)
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    shares = [federation.clients.get("fedcurv", c) or {} for c in (0, 1)]
    alone = 0
    for name, (u, v) in held.items():
        for row in (0, 1):
            own, other = shares[row], shares[1 - row]
            torch.testing.assert_close(u[row], other[f"u {name}"], rtol=1e-4, atol=1e-7 * float(fedcurv.u[name].max()))
            only_own = other[f"u {name}"] == 0
            assert (u[row][only_own] == 0).all()  # exactly
            assert (v[row][only_own] == 0).all()
            only_other = own[f"u {name}"] == 0
            assert torch.equal(u[row][only_other], other[f"u {name}"][only_other])
            assert torch.equal(v[row][only_other], other[f"v {name}"][only_other])
            alone += int((only_own & ~only_other).sum())
    assert alone > 0 or keep == 1


def test_what_rounding_takes_below_zero_is_zero() -> None:
    client, fedcurv, _ = two_clients()
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    normal = {n: (u.clone(), v.clone()) for n, (u, v) in held.items()}
    below = {n: (fedcurv.u[n] - u[0] * 1.001).minimum(fedcurv.u[n]) for n, (u, _) in normal.items()}
    fedcurv.u = below  # less than the first client's own share
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    for name, (u, v) in held.items():
        assert (u >= 0).all()
        lost = below[name] < fedcurv.context.clients.get("fedcurv", 0)[f"u {name}"]  # type: ignore[index]
        assert (u[0][lost] == 0).all()
        assert (v[0][lost] == 0).all()
        if name == "head.weight":
            assert lost.any()
            assert (normal[name][1][0][lost] != 0).any()


def test_a_share_of_an_earlier_round_is_not_subtracted() -> None:
    client, fedcurv, federation = two_clients()
    rows = {n: t.clone() for n, t in (federation.clients.get("fedcurv", 0) or {}).items()}
    rows["round"] -= 1
    federation.clients.scatter("fedcurv", [0], {n: t[None] for n, t in rows.items()})
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    for name, (u, v) in held.items():
        assert torch.equal(u[0], fedcurv.u[name])
        torch.testing.assert_close(v[0], fedcurv.v[name] * (fedcurv.u[name] > 0), rtol=0, atol=0)
        assert (u[1] <= fedcurv.u[name]).all()


def test_the_sums_follow_the_network_to_its_device() -> None:
    client, fedcurv, federation = two_clients()
    federation.network.to("meta")
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    assert {t.device.type for pair in held.values() for t in pair} == {"meta"}


def test_a_client_that_is_left_out_has_no_share() -> None:
    """A skipped client is not in the sums of its round. It keeps its share of an older round."""

    def methods() -> dict[str, Method]:
        fedcurv = FedCurv(1.0)
        return {"poison": Poison(0, 1), "fedcurv": fedcurv, "sums": FreshSums(fedcurv)}

    options = {"clients_per_round": 1.0, "rounds_per_task": 3}
    data = {"data": data_of(tasks=1, participation=None, schedule=options)}
    with pytest.raises(BadUpdate, match=r"client 0 .*round 1"):
        run(methods(), **data)
    made = methods()
    federation = run(made, **data, federated={"on_bad_update": "skip"})
    assert federation.channel.skipped == [(1, 0, 0)]
    sums, fedcurv = made["sums"], made["fedcurv"]
    assert isinstance(sums, FreshSums)
    shares = {c: federation.clients.get("fedcurv", c) or {} for c in range(5)}
    assert [int(share["round"]) for share in shares.values()] == [0, 1, 1, 1, 1]
    u = {n: sum(shares[c][f"u {n}"] for c in range(1, 5)) for n in sums.sums[1][0]}
    assert_close(sums.sums[1][0], u)  # type: ignore[arg-type]
    assert [row["clients"] for row in fedcurv.report().rows] == [5, 4]


# Bytes.


def test_bytes_are_counted() -> None:
    """Three clients in six rounds. u and v go up in all rounds but the last, and down in all but the first."""
    federation = run({"fedcurv": FedCurv(1.0)})
    model = sum(p.numel() for p in federation.network.parameters()) * 8
    assert federation.channel.uplink_bytes == {"update": 6 * 3 * model, "fedcurv": 5 * 3 * 2 * model}
    assert federation.channel.downlink_bytes == {"model": 6 * 3 * model, "fedcurv": 5 * 3 * 2 * model}
    summary = federation.methods["fedcurv"].report().figures
    assert summary.pop("fisher_seconds") > 0
    assert summary == {"client_bytes": 2 * model, "fisher_bytes": 2 * model, "penalty_bytes": 2 * model}


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.9])
def test_only_the_largest_entries_are_sent(keep: float) -> None:
    """Runs with and without ``keep`` have the same first round, so their shares are of the same weights."""
    data = {"data": data_of(tasks=1, schedule={"rounds_per_task": 2})}
    whole = run({"fedcurv": FedCurv(1e-9)}, **data)
    fedcurv = FedCurv(1e-9, keep=keep)
    sparse = run({"fedcurv": fedcurv}, **data)
    names = whole.model.shared_parameters
    size = sum(p.numel() for p in whole.network.parameters())
    kept = math.ceil(round(keep * size, 9))
    union: set[int] = set()
    for client in whole.clients.holders("fedcurv"):
        full, few = (f.clients.get("fedcurv", client) or {} for f in (whole, sparse))
        u, v = (torch.cat([full[f"{kind} {n}"].flatten() for n in names]) for kind in "uv")
        best = set(sorted(range(size), key=lambda i, u=u: (-float(u[i]), i))[:kept])  # type: ignore[misc]
        union |= {i for i in best if u[i] > 0}
        for kind, values in (("u", u), ("v", v)):
            expected = [float(value) if i in best else 0.0 for i, value in enumerate(values)]
            assert torch.cat([few[f"{kind} {n}"].flatten() for n in names]).tolist() == expected
    up = min(kept * (8 + 8 + 4), size * 16)
    down = min(len(union) * (8 + 8 + 4), size * 16)
    assert sparse.channel.uplink_bytes["fedcurv"] == 3 * up
    assert sparse.channel.downlink_bytes["fedcurv"] == 3 * down
    assert fedcurv.report().figures["penalty_bytes"] == down
    assert fedcurv.client_storage() == up
    assert (up < 16 * size) == (keep < 0.8)


def test_keeping_everything_is_the_dense_method() -> None:
    """A ``keep`` of 0.999999 is rounded up to all entries."""
    dense, sparse = run({"fedcurv": FedCurv(1.0)}), run({"fedcurv": FedCurv(1.0, keep=0.999999)})
    assert_close(weights(sparse), weights(dense))
    assert sparse.channel.uplink_bytes == dense.channel.uplink_bytes
    less = run({"fedcurv": FedCurv(1.0, keep=0.1)})
    assert max(float((weights(less)[n] - w).abs().max()) for n, w in weights(dense).items()) > 1e-6


# Stability.


def test_a_pull_that_is_too_strong_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fedcurv = FedCurv(1e3)
        run({"fedcurv": fedcurv}, data_of(tasks=1, schedule={"rounds_per_task": 2}))
    rows = fedcurv.report().rows
    u_max = max(float(u.max()) for u in fedcurv.u.values())
    assert rows[0]["u_max"] == u_max
    assert rows[0]["greatest_pull"] == pytest.approx(2 * 1e3 * 0.1 * u_max) == pytest.approx(200 * u_max)
    (record,) = [r for r in caplog.records if r.name == "cfl.methods.fedcurv"]
    text = record.getMessage()
    assert "methods.fedcurv.strength = 1000 with lr = 0.1" in text
    assert f"strength below {10 / u_max:.3g}" in text
    limit = 10 / u_max
    caplog.clear()
    for strength, warned in ((0.9 * limit, 0), (1.1 * limit, 1)):
        data = data_of(tasks=1, schedule={"rounds_per_task": 2})
        with caplog.at_level(logging.WARNING):
            run({"fedcurv": FedCurv(strength)}, data)
        assert len([r for r in caplog.records if r.name == "cfl.methods.fedcurv"]) == warned


def test_it_warns_once_per_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run({"fedcurv": FedCurv(60.0)}, federated={"on_bad_update": "skip"}, gradient_clip_val=0.1)
    assert len([r for r in caplog.records if r.name == "cfl.methods.fedcurv"]) == 1


def test_a_pull_that_is_too_strong_may_stop_the_run() -> None:
    with pytest.raises(ConfigError, match=r"methods\.fedcurv\.strength = 1000\.0 .*lr max\(u\) = .* after round 0"):
        run({"fedcurv": FedCurv(1e3, on_unstable="stop")})
    assert run({"fedcurv": FedCurv(0.1, on_unstable="stop")}).finished


def test_a_pull_may_be_clipped() -> None:
    """Too strong a pull becomes a step onto the others' weights. Weaker pulls and all targets stay as they are."""
    client, fedcurv, _ = two_clients()
    clipped_client, clipped, _ = two_clients(on_unstable="clip")
    for method in (fedcurv, clipped):
        method.strength = 30.0  # after the run: the sums are the same
    held = fedcurv._held_to(client.methods.shown(fedcurv))
    clipped_held = clipped._held_to(clipped_client.methods.shown(clipped))
    limited = 0
    for name, (u, v) in held.items():
        pull, other = clipped_held[name]
        strong = 2 * 30 * 0.1 * u > 1
        torch.testing.assert_close(2 * 30 * 0.1 * pull[strong], torch.ones_like(pull[strong]))
        torch.testing.assert_close(other[strong] / pull[strong], v[strong] / u[strong], rtol=1e-5, atol=1e-7)
        assert torch.equal(pull[~strong], u[~strong])
        assert torch.equal(other[~strong], v[~strong])
        limited += int(strong.sum())
    assert 0 < limited < sum(u.numel() for u, _ in held.values())


def test_a_clipped_pull_does_not_diverge() -> None:
    def go(on_unstable: Any) -> Federation:
        fedcurv = FedCurv(1e4, on_unstable=on_unstable)
        return run({"fedcurv": fedcurv}, federated={"on_bad_update": "stop"})

    assert all(bool(torch.isfinite(value).all()) for value in weights(go("clip")).values())
    with pytest.raises(BadUpdate):
        go("warn")


@pytest.mark.parametrize("on_unstable", ["stop", "clip"])
def test_other_optimizers_are_not_watched(on_unstable: Any) -> None:
    fedcurv = FedCurv(1.0)
    run({"fedcurv": fedcurv}, optimizer=ADAM)
    assert {row["greatest_pull"] for row in fedcurv.report().rows} == {None}
    with pytest.raises(
        ConfigError, match=r"methods\.fedcurv\.on_unstable = .* valid: warn while the optimizer is Adam"
    ):
        run({"fedcurv": FedCurv(1.0, on_unstable=on_unstable)}, optimizer=ADAM)


# Reports, and what is refused.


def test_reports() -> None:
    fedcurv = FedCurv(1.0)
    federation = run({"fedcurv": fedcurv})
    rows = fedcurv.report().rows
    assert [(row["round"], row["clients"]) for row in rows] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)]
    u = torch.cat([value.flatten() for value in fedcurv.u.values()])
    assert rows[-1]["u_mean"] == pytest.approx(float(u.mean()))
    assert rows[-1]["u_max"] == float(u.max())
    assert fedcurv.report().figures["fisher_seconds"] == sum(row["fisher_seconds"] for row in rows) > 0
    held = federation.clients.bytes() // len(federation.clients.holders("fedcurv"))
    assert held == fedcurv.client_storage() + 8  # and the round's number


def test_without_exchanged_parameters_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="all parameters stay on their client") as caught:
        run({"own": PersonalLayers(["*"]), "fedcurv": FedCurv(1.0)})
    assert (caught.value.key, caught.value.value) == ("methods.fedcurv.strength", 1.0)
    assert run({"own": PersonalLayers(["*"]), "fedcurv": FedCurv(0.0)}).channel.uplink_bytes == {}


@pytest.mark.parametrize("exposure", ["cumulative", "asynchronous"])
def test_clients_that_train_on_other_samples_are_refused(exposure: Any) -> None:
    data = tiny_data(exposure=exposure)
    with pytest.raises(ConfigError, match=r"data\.exposure"):
        fit(tiny_client(data, mlp, sgd, {"fedcurv": FedCurv()}), data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_has_the_same_anchors(dtype: torch.dtype) -> None:
    """float16's smallest normal number, 6e-5, is a usual entry of a Fisher."""
    u = torch.tensor([1e-3, 1e-4, 5e-5, 1e-5, 0.0], dtype=torch.float64)
    held, sums = u.to(dtype), (2 * u).to(dtype)
    expected = [2.0, 2.0, 2.0, 2.0, 0.0]
    torch.testing.assert_close(_anchor(held, sums).double(), torch.tensor(expected).double(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("options", [{}, {"keep": 0.3}, {"on_unstable": "clip"}], ids=str)
def test_parameters_without_elements_change_nothing(options: dict[str, Any]) -> None:
    found = []
    for network in (WithoutElements, Plain):
        data = tiny_data(permuted(1), schedule={"rounds_per_task": 2})
        found.append(run({"fedcurv": FedCurv(0.5, **options)}, data, network))
    found_weights = [{n: t for n, t in weights(federation).items() if t.numel()} for federation in found]
    torch.testing.assert_close(*found_weights, rtol=0, atol=1e-12)
    more, rows = ([r["u_max"] for r in federation.methods["fedcurv"].report().rows] for federation in found)
    assert more == pytest.approx(rows, rel=1e-9)
