"""DPFedAvg and Poisson sampling: bounds client by client, the noise of the sum, and rounds without clients."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Rounds, SaveAfter, double, fit, mlp, norm_net, sgd, split, tiny_client, tiny_data, weights
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.sequences import FixedTasks
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.methods import DER, ER, FOT, DPFedAvg, FedWeIT, Method, PersonalLayers
from cfl.models import MLP
from cfl.privacy.release import Noise
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError

STILL = partial(torch.optim.SGD, lr=0.0)
"""An optimizer with which clients' updates are zero."""
PRECISE = double(mlp)


def half(*shape: Any) -> nn.Module:
    """A network in half precision, whose sums are rounded before noise is added."""
    return mlp(*shape).to(torch.bfloat16)


class Watched(DPFedAvg):
    """Record clients' updates before and after they are bounded."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.given: list[dict[str, Tensor]] = []
        self.sent: list[dict[str, Tensor]] = []
        self.rounds: list[int] = []

    def bounded_updates(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        self.rounds.append(self.context.round)
        self.given.append({name: rows.clone() for name, rows in updates.items()})
        self.sent.append({name: rows.clone() for name, rows in super().bounded_updates(updates).items()})
        return {name: rows.clone() for name, rows in self.sent[-1].items()}


POISSON = {"sampling": "poisson", "rounds_per_task": 6}


def poisson(clients: float | int = 2) -> FederatedDataModule:
    return tiny_data(num_clients=4, schedule={**POISSON, "clients_per_round": clients})


def run(
    data: FederatedDataModule,
    methods: dict[str, Method],
    network: Any = PRECISE,
    optimizer: Any = sgd,
    **options: Any,
) -> Federation:
    return fit(tiny_client(data, network, optimizer, methods), data, **options)


def one_round(**options: Any) -> FederatedDataModule:
    return tiny_data(num_clients=4, schedule={"rounds_per_task": [1, 1], "cohort_width": 3, **options})


@pytest.mark.parametrize("per_layer", [False, True])
def test_every_client_is_bounded_by_itself_and_the_mean_is_over_expected_clients(per_layer: bool) -> None:
    data, watch = one_round(), Rounds()
    method = Watched(0.14, 0.3, per_layer=per_layer, quantile=0.5)
    run(data, {"dp": method}, callbacks=[watch])
    start = dict(tiny_client(data, double(mlp)).network.named_parameters())
    names = list(start)
    layers = [[n for n in names if n.startswith(layer)] for layer in ("layers.0", "head")] if per_layer else [names]
    assert sum(map(len, layers)) == len(names)
    bound = 0.14 / math.sqrt(len(layers))
    # A twentieth of four clients, but with two bounds as much as leaves z' within twice z = 0.3.
    assert method._count_noise == pytest.approx(0.3 * math.sqrt(2 / 3) if per_layer else 0.2)
    total = {n: torch.zeros_like(p) for n, p in start.items()}
    clients = within = 0
    for given, sent in zip(method.given[:2], method.sent[:2], strict=True):  # cohorts of the first round
        for row in range(len(given[names[0]])):
            clients += 1
            for number, layer in enumerate(layers):
                norm = math.sqrt(sum(float((given[n][row] ** 2).sum()) for n in layer))
                within += norm <= bound
                assert sent["updates within the bound"][row, number] == (0.5 if norm <= bound else -0.5)
                for name in layer:
                    expected = given[name][row] * min(1.0, bound / norm)
                    torch.testing.assert_close(sent[name][row], expected, rtol=1e-12, atol=0)
                    total[name] += expected
    assert clients == 4
    assert 0 < within < 4 * len(layers)
    generator = torch_generator(data.seed, "update noise", 0)
    scale = method._update_multiplier * 0.14
    for name, tensor in start.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        moved = tensor + (total[name] + scale * noise) / 4
        torch.testing.assert_close(watch.models[0][name], moved.detach(), rtol=1e-9, atol=1e-12)
    (row, _) = method.report().rows
    count = torch.randn(len(layers), generator=generator).double() * method._count_noise
    share = float((count + (within - 2 * len(layers)) / len(layers)).mean()) / 4 + 0.5
    if not per_layer:
        assert row["within"] == pytest.approx(share, rel=1e-9)
        assert float(method.report().rows[1]["clip"]) == pytest.approx(0.14 * math.exp(-0.2 * (share - 0.5)), rel=1e-9)


@pytest.mark.parametrize("per_layer", [False, True])
def test_each_bound_moves_by_its_own_share_and_has_noise_of_its_own_size(per_layer: bool) -> None:
    """Two rounds computed by hand: bounds that are equal in the first differ in the second."""
    data, watch = one_round(), Rounds()
    method = Watched(0.14, 0.3, per_layer=per_layer, quantile=0.9, clip_lr=0.7, count_noise=0.5)
    run(data, {"dp": method}, callbacks=[watch])
    before = weights_of_start(data)
    layers = [[n for n in before if n.startswith(p)] for p in (("layers.0", "head") if per_layer else ("",))]
    bounds = [0.14 / math.sqrt(len(layers))] * len(layers)
    multiplier = (0.3**-2 - len(layers) * (2 * 0.5) ** -2) ** -0.5
    for round in range(2):
        generator = torch_generator(data.seed, "update noise", round)
        updates = [given for r, given in zip(method.rounds, method.given, strict=True) if r == round]
        rows = [{n: values[row] for n, values in of.items()} for of in updates for row in range(len(of["head.bias"]))]
        assert len(rows) == 4
        moved = []
        for bound, layer in zip(bounds, layers, strict=True):
            norms = [math.sqrt(sum(float(row[n].square().sum()) for n in layer)) for row in rows]
            moved.append(sum(0.5 if norm <= bound else -0.5 for norm in norms))
            for name in layer:
                total = sum(row[name] * min(1.0, bound / norm) for row, norm in zip(rows, norms, strict=True))
                noise = torch.randn(before[name].shape, generator=generator).to(before[name])
                expected = before[name] + (total + multiplier * math.sqrt(len(layers)) * bound * noise) / 4
                torch.testing.assert_close(watch.models[round][name], expected, rtol=1e-9, atol=1e-12)
        counted = torch.tensor(moved).double() + 0.5 * torch.randn(len(layers), generator=generator).double()
        shares = (counted / 4 + 0.5).tolist()
        bounds = [bound * math.exp(-0.7 * (share - 0.9)) for bound, share in zip(bounds, shares, strict=True)]
        before = watch.models[round]
    assert method.clips.tolist() == pytest.approx(bounds, rel=1e-6)
    assert len(set(bounds)) == len(layers)


@pytest.mark.parametrize("options", [{}, {"per_layer": True}, {"quantile": 0.9, "per_layer": True}], ids=str)
def test_the_noise_of_the_sum_has_its_standard_deviation(options: dict[str, Any]) -> None:
    data, watch = one_round(), Rounds()
    method = DPFedAvg(0.4, 2.0, **options)
    wide = partial(MLP, hidden=[120], dropout=0.0)
    run(data, {"dp": method}, wide, STILL, callbacks=[watch])
    start = dict(tiny_client(data, wide).network.named_parameters())
    noise = torch.cat([(4 * (watch.models[0][n] - p)).detach().flatten() for n, p in start.items()])
    multiplier = 2.0
    if "quantile" in options:  # both sums together have the multiplier 2
        bounds = len(method.groups)
        multiplier = method._update_multiplier
        assert multiplier**-2 + bounds / (2 * method._count_noise) ** 2 == pytest.approx(2.0**-2)
    assert float(noise.std()) == pytest.approx(0.4 * multiplier, rel=5 / math.sqrt(2 * len(noise)))
    assert abs(float(noise.mean())) < 5 * 0.4 * multiplier / math.sqrt(len(noise))


def test_an_adaptive_bound_comes_to_the_quantile_of_the_norms() -> None:
    data = tiny_data(num_clients=4, schedule={"rounds_per_task": [30, 1], "cohort_width": 4})
    method = Watched(10.0, 0.0, quantile=0.5, clip_lr=0.5)
    run(data, {"dp": method}, callbacks=[])
    last = method.given[29]
    norms = torch.stack([rows.flatten(1).square().sum(1) for rows in last.values()]).sum(0).sqrt()
    bound = method.report().rows[29]["clip"]
    assert norms.min() <= 1.3 * bound
    assert bound <= 1.3 * norms.max()
    assert method.report().rows[0]["within"] == 1.0


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_clients_that_drop_out_do_not_count_as_half_within_the_bound(lost: float) -> None:
    """Updates of 0 are within any bound, so that the bound falls towards their quantile, whoever drops out."""
    data = tiny_data(num_clients=4, schedule={"rounds_per_task": [5, 1], "client_dropout": lost})
    method = DPFedAvg(1.0, 0.0, quantile=0.9)
    run(data, {"dp": method}, optimizer=STILL)
    rows = method.report().rows
    assert [row["within"] for row in rows] == [1.0] * 6
    assert [row["clip"] for row in rows] == pytest.approx([math.exp(-0.2 * 0.1 * round) for round in range(6)])


def test_a_parameter_that_is_one_number_is_bounded_with_the_rest() -> None:
    class Scaled(MLP):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, hidden=[5])
            self.scale = nn.Parameter(torch.tensor(2.0))

        def features(self, x: Tensor) -> Tensor:
            return self.scale * super().features(x)

    method = Watched(0.01, 0.0)
    run(one_round(), {"dp": method}, double(Scaled))
    for sent in method.sent:
        assert {rows.ndim for rows in sent.values()} >= {1, 3}
        squares = [rows.reshape(len(rows), -1).square().sum(1) for rows in sent.values()]
        torch.testing.assert_close(torch.stack(squares).sum(0), torch.full((len(squares[0]),), 1e-4).double())


# Sampling, and rounds that nobody joins.


def test_clients_join_by_themselves_with_the_rate() -> None:
    data = tiny_data(num_clients=10, schedule={"sampling": "poisson", "clients_per_round": 3, "rounds_per_task": 500})
    plans = [data.rounds.round(r).clients for r in range(1000)]
    assert data.rounds.sampling_rate(0) == 0.3
    assert data.rounds.expected_clients(0) == pytest.approx(3.0)
    assert data.rounds.most_clients == max(map(len, plans))
    counts = torch.bincount(torch.tensor([c for clients in plans for c in clients]), minlength=10)
    assert ((counts - 300).abs() < 5 * math.sqrt(1000 * 0.3 * 0.7)).all()
    sizes = torch.tensor([float(len(clients)) for clients in plans])
    assert float(sizes.var()) == pytest.approx(10 * 0.3 * 0.7, rel=0.3)
    fraction = tiny_data(num_clients=10, schedule={"sampling": "poisson", "clients_per_round": 0.05})
    assert fraction.rounds.sampling_rate(0) == 0.05  # not rounded to a number of clients
    assert fraction.rounds.expected_clients(0) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["vmap", "workers"])
def test_rounds_that_nobody_joins_close(kind: str) -> None:
    data = poisson(1)
    empty = [r for r in range(12) if not data.rounds.round(r).clients]
    assert len(empty) > 2
    results = []
    for methods in ({}, {"dp": DPFedAvg(0.1, 0.5)}):
        watch = Rounds()
        client = tiny_client(data, double(mlp), sgd, methods, EngineOptions(kind))  # type: ignore[arg-type]
        federation = fit(client, data, callbacks=[watch])
        assert federation.round == 12
        results.append(watch.models)
    plain, noisy = results
    for round in empty:
        before = plain[round - 1] if round else weights_of_start(data)
        assert all(torch.equal(plain[round][name], value) for name, value in before.items())
        if round:
            moved = [noisy[round][name] - value for name, value in noisy[round - 1].items()]
            # Noise of standard deviation 0.1 * 0.5, divided by one expected client.
            assert float(torch.cat([m.flatten() for m in moved]).std()) == pytest.approx(0.05, rel=0.3)


def test_sums_are_divided_by_the_clients_that_their_round_expects() -> None:
    """Not by those that joined, nor by those of the first round: the rate is of the clients that hold the task."""
    schedule = {**POISSON, "clients_per_round": 0.5, "cohort_width": 6}
    data = tiny_data(num_clients=6, participation=Joining(3, 3), schedule=schedule)
    method, watch = Watched(0.05, 0.0, quantile=0.5), Rounds()
    run(data, {"dp": method}, callbacks=[watch])
    assert [data.rounds.expected_clients(round) for round in (0, 6)] == [1.5, 3.0]
    joined = set()
    for round, messages in zip(method.rounds, method.sent, strict=True):
        expected, count = (1.5, 3.0)[round // 6], len(messages["updates within the bound"])
        before = watch.models[round - 1] if round else weights_of_start(data)
        for name, rows in messages.items():
            if name == "updates within the bound":
                found = method.report().rows[round]["within"]
                assert found == pytest.approx(float(rows.sum()) / expected + 0.5, rel=1e-9)
            else:
                moved = watch.models[round][name] - before[name]
                torch.testing.assert_close(moved, rows.sum(0) / expected, rtol=1e-9, atol=1e-12)
        joined.add((expected, count))
    assert len({count for expected, count in joined if expected == 3.0}) > 1


def test_rounds_that_nobody_joins_leave_an_adaptive_bound_at_the_median_as_it_is() -> None:
    data, method = poisson(1), DPFedAvg(0.1, 0.0, quantile=0.5)
    run(data, {"dp": method})
    bounds = [row["clip"] for row in method.report().rows]
    empty = [round for round in range(11) if not data.rounds.round(round).clients]
    assert len(empty) > 2
    assert all(bounds[round + 1] == bounds[round] for round in empty)
    assert len(set(bounds)) > 2


@pytest.mark.parametrize(
    ("beside", "earlier"), [({}, False), ({"er": ER(2)}, True), ({"der": DER(2)}, True)], ids=["alone", "er", "der"]
)
def test_rounds_without_clients_move_the_outputs_that_others_move(beside: dict[str, Method], earlier: bool) -> None:
    """Noise moves the same outputs in all rounds, so that models do not show which rounds have clients.

    These are the outputs of the task, and of earlier tasks if samples are replayed.
    """
    data = tiny_data(split(2), num_clients=4, schedule={**POISSON, "clients_per_round": 1}, scenario="task")
    second = range(7, 12)
    assert {bool(data.rounds.round(r).clients) for r in second} == {True, False}
    watch = Rounds()
    run(data, {**beside, "dp": DPFedAvg(0.1, 0.5)}, callbacks=[watch])
    for r in second:
        moved = (watch.models[r]["head.bias"] - watch.models[r - 1]["head.bias"]) != 0
        assert moved.tolist() == [earlier, earlier, True, True]


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({"exposure": "cumulative"}, [{0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}]),
        ({"exposure": "joint"}, [{0, 1, 2, 3, 4, 5}] * 3),
        ({"sequences": FixedTasks([[0, 1], [2, 1], [0, 1], [2, 1]])}, [{0, 1, 4, 5}, {2, 3}]),
    ],
    ids=["cumulative", "joint", "own tasks"],
)
def test_all_rounds_move_the_outputs_of_all_tasks_that_any_client_may_train_on(
    options: dict[str, Any], outputs: list[set[int]]
) -> None:
    data = tiny_data(
        split(3, classes=6), num_clients=4, schedule={**POISSON, "clients_per_round": 1}, scenario="task", **options
    )
    assert {bool(data.rounds.round(r).clients) for r in range(data.num_rounds)} == {True, False}
    watch = Rounds()
    run(data, {"dp": DPFedAvg(0.1, 0.5)}, callbacks=[watch])
    before = weights_of_start(data)
    for round, model in enumerate(watch.models):
        moved = (model["head.bias"] - before["head.bias"]).nonzero().flatten().tolist()
        assert set(moved) == outputs[data.rounds.round(round).task]
        before = model


class AtOwnPace(DPFedAvg):
    """A method of a user's own that bounds updates of clients with their own clocks."""

    client_clocks = True


@pytest.mark.parametrize("beside", [{}, {"der": DER(2)}], ids=["alone", "der"])
def test_rounds_move_the_outputs_of_clients_that_are_ahead(beside: dict[str, Method]) -> None:
    """These are the outputs of all tasks at which clients may be, and with replay of earlier ones."""
    schedule = {"rounds_per_task": 3, "clock_spread": 0.67, "clients_per_round": 2}
    data = tiny_data(split(3, classes=6), num_clients=4, schedule=schedule, scenario="task")
    watch, ahead = Rounds(), 0
    run(data, {**beside, "dp": AtOwnPace(0.1, 0.5)}, callbacks=[watch])
    before = weights_of_start(data)
    for round, model in enumerate(watch.models):
        begun = [sum(data.rounds.began(task, client) <= round for task in range(3)) - 1 for client in range(4)]
        at = [task for client, task in enumerate(begun) if client in data.rounds.present(round)]
        moved = (model["head.bias"] - before["head.bias"]).nonzero().flatten().tolist()
        assert moved == list(range(0 if beside else 2 * min(at), 2 * max(at) + 2))
        before, ahead = model, ahead + (max(at) > min(at))
    assert ahead > 2


def test_dropouts_beside_clients_that_join_by_themselves_are_refused() -> None:
    """The number of dropouts is a share of the clients that joined, so it would reveal whether a client joined."""
    schedule = {**POISSON, "client_dropout": 0.5}
    run(tiny_data(num_clients=4, schedule=schedule), {})
    with pytest.raises(ConfigError, match=r"schedule\.client_dropout = 0\.5 .*methods\.dp \(DPFedAvg\)"):
        run(tiny_data(num_clients=4, schedule=schedule), {"dp": DPFedAvg(0.1, 0.5)})


def weights_of_start(data: FederatedDataModule) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in tiny_client(data, double(mlp)).network.named_parameters()}


def test_a_stream_whose_tasks_end_without_clients_is_refused_beside_methods_that_ask_them_for_more() -> None:
    data = tiny_data(num_clients=4, schedule={"sampling": "poisson", "clients_per_round": 0.3, "rounds_per_task": 3})
    assert not data.rounds.round(2).clients
    run(data, {})
    with pytest.raises(ConfigError, match=r"schedule.sampling.*nobody joins round 2, the last of task 0"):
        run(data, {"fot": FOT()})


# The ledger of a run.


def test_the_ledger_counts_every_round_and_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    saved = SaveAfter(7, tmp_path / "7.ckpt")
    whole = run(poisson(), {"dp": DPFedAvg(0.1, 0.5, quantile=0.5)}, callbacks=[saved])
    resumed = run(poisson(), {"dp": DPFedAvg(0.1, 0.5, quantile=0.5)}, ckpt_path=tmp_path / "7.ckpt")
    releases = whole.channel.ledger.releases
    assert [(one.round, one.task, one.rate, one.clients) for one in releases] == [
        (round, round // 6, 0.5, (0, 1, 2, 3)) for round in range(12)
    ]
    assert {one.noise.multiplier for one in releases} == {0.5}
    assert len({one.noise.sensitivity for one in releases}) == 12  # the bound moves
    assert resumed.channel.ledger.state_dict() == whole.channel.ledger.state_dict()
    assert all(torch.equal(ours, weights(resumed)[name]) for name, ours in weights(whole).items())


def test_of_a_fixed_number_of_clients_those_pay_who_took_part() -> None:
    data = tiny_data(num_clients=4, schedule={"clients_per_round": 2})
    releases = run(data, {"dp": DPFedAvg(0.1, 0.5)}).channel.ledger.releases
    assert [(one.clients, one.rate) for one in releases] == [(data.rounds.round(r).clients, None) for r in range(6)]
    assert not run(data, {"dp": DPFedAvg(0.1, 0.0)}).channel.ledger.releases


# Refusals.


@pytest.mark.parametrize(
    ("methods", "network", "federated", "key"),
    [
        ({"dp": DPFedAvg()}, norm_net, {}, "federated.batchnorm"),
        ({"dp": DPFedAvg()}, mlp, {"client_weighting": "samples"}, "federated.client_weighting"),
        ({"dp": DPFedAvg(), "again": DPFedAvg()}, mlp, {}, "methods"),
        ({"dp": DPFedAvg(), "weit": FedWeIT()}, mlp, {}, "methods"),
        ({"own": PersonalLayers(["*"]), "dp": DPFedAvg()}, mlp, {}, "methods.dp.clip"),
        ({"dp": DPFedAvg(quantile=0.5, count_noise=0.4)}, mlp, {}, "methods.dp.count_noise"),
        ({"dp": DPFedAvg()}, half, {}, "methods.dp.clip"),
    ],
    ids=["statistics", "weights", "twins", "single messages", "nothing sent", "count noise", "half precision"],
)
def test_runs_in_which_it_would_not_protect_are_refused(
    methods: dict[str, Method], network: Any, federated: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} "):
        run(one_round(), methods, network, federated=federated)


def test_a_sum_without_noise_is_no_release() -> None:
    with pytest.raises(ValueError, match="multiplier"):
        Noise(0.0, 1.0)
