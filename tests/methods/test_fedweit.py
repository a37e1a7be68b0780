"""FedWeIT against a run written out, and what it sends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.naive_decomposed import assert_the_same, data_of, renamed, written_out
from support.tiny import ConvNet, double, fit, kept_by, mlp, permuted, sgd, split, tiny_client, tiny_data
from torch import Tensor
from torch.func import functional_call

from cfl.data.client_clocks import rounds_of_clients
from cfl.data.schedule import RoundPlan
from cfl.data.sequences import FixedTasks
from cfl.engines import EngineOptions
from cfl.engines.choice import EngineChoice
from cfl.engines.cohort import Cohort
from cfl.engines.probe import Trial
from cfl.engines.trials import Trials
from cfl.federation.federation import Federation
from cfl.methods import FedProx, FedWeIT, Method
from cfl.models import MLP
from cfl.models.decomposition import decomposed_layers
from cfl.runtime.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "sparsity": 0.01,
    "mask_sparsity": 0.003,
    "consolidation": 2.0,
    "weight_decay": 0.02,
    "retroactive": True,
}
FROZEN = {**OPTIONS, "retroactive": False}
SPARSE = {**OPTIONS, "sparsity": 0.06}
LITERAL = {**OPTIONS, "draws": "own", "base_mean": "clients", "lenders": "next_round"}  # Algorithm 2, line by line
ADAM = partial(torch.optim.Adam, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
BASE, UNITS = 16 * 8, 8  # of the one decomposed layer of the MLP


@pytest.mark.parametrize(
    ("stream", "make", "options", "optimizer", "width", "engine", "sampled"),
    [
        (None, mlp, OPTIONS, sgd, 1, "vmap", 2),
        (None, mlp, {**OPTIONS, "draws": "own"}, ADAM, 2, "vmap", 2),
        (None, mlp, FROZEN, MOMENTUM, 2, "workers", 2),
        (None, mlp, OPTIONS, ADAM, 1, "vmap", 1),
        (split(3, classes=6), mlp, {**SPARSE, "retroactive": False}, ADAM, 2, "vmap", 2),
        (split(3, classes=6), ConvNet, {**SPARSE, "draws": "own"}, MOMENTUM, 2, "workers", 2),
        (None, ConvNet, FROZEN, sgd, 1, "vmap", 1),
        (None, ConvNet, LITERAL, ADAM, 2, "vmap", 2),
        (None, mlp, {**LITERAL, "draws": "common"}, sgd, 1, "workers", 1),
    ],
)
def test_a_whole_run_is_the_one_written_out(
    stream: Any, make: Any, options: dict[str, Any], optimizer: Any, width: int, engine: Any, sampled: int
) -> None:
    data = data_of(stream, width, clients_per_round=sampled)
    method = FedWeIT(**options, keep=0.4)
    client = tiny_client(data, double(make), optimizer, {"fedweit": method}, EngineOptions(engine))
    federation = fit(client, data)
    fresh = tiny_client(data, double(make), optimizer, {"fedweit": FedWeIT(**options)})
    run = {"make_optimizer": optimizer, "exchange": "units", "lends": True}
    naive = written_out(fresh, data, make, method, {**options, "keep": 0.4}, **run)
    assert_the_same(federation, method, naive)
    assert any(not bool(units.all()) for units in naive.sent.values()), "some units are sent by nobody"
    if sampled == 1:
        assert any(len(owner.filed) + 1 < 3 for owner in naive.owners.values()), "somebody misses a task"
    if "lenders" in options:
        last, first = ([data.rounds.round(number).clients for number in numbers] for numbers in ((1, 3), (2, 4)))
        assert list(map(list, last)) != list(map(list, first)), "others send than by default"


@pytest.mark.parametrize(
    ("make", "options", "optimizer", "width", "engine", "sampled", "share"),
    [
        (mlp, OPTIONS, ADAM, 2, "vmap", 1.0, 0.34),
        (ConvNet, {**FROZEN, "draws": "own"}, MOMENTUM, 3, "workers", 1.0, 0.6),
        (mlp, LITERAL, sgd, 1, "vmap", 2, 0.5),
    ],
)
def test_clients_that_do_not_communicate_train_by_themselves(
    make: Any, options: dict[str, Any], optimizer: Any, width: int, engine: Any, sampled: Any, share: float
) -> None:
    data = data_of(None, width, clients_per_round=sampled, rounds_per_task=3)
    method = FedWeIT(**options, keep=0.4, communicating=share)
    federation = fit(tiny_client(data, double(make), optimizer, {"fedweit": method}, EngineOptions(engine)), data)
    fresh = tiny_client(data, double(make), optimizer, {"fedweit": FedWeIT(**options)})
    senders = {number: method._senders(data.rounds.round(number)) for number in range(data.num_rounds)}
    training = {number: data.rounds.round(number).clients for number in senders}
    assert {len(own) / len(training[number]) for number, own in senders.items()} == {
        round(share * 3) / 3 if sampled == 1.0 else 0.5
    }
    assert all(set(own) < set(training[number]) for number, own in senders.items())
    assert len(set(senders.values())) > 1
    run = {"make_optimizer": optimizer, "exchange": "units", "lends": True, "senders": senders}
    naive = written_out(fresh, data, make, method, {**options, "keep": 0.4}, **run)
    assert_the_same(federation, method, naive)


@pytest.mark.parametrize(
    ("make", "options", "optimizer", "width", "engine", "sampled", "common"),
    [
        (mlp, OPTIONS, ADAM, 1, "vmap", 1.0, False),
        (ConvNet, SPARSE, MOMENTUM, 2, "workers", 1.0, False),
        (mlp, FROZEN, sgd, 2, "vmap", 2, False),
        (mlp, OPTIONS, ADAM, 2, "vmap", 1.0, True),
    ],
)
def test_clients_with_clocks_of_their_own_are_the_paper_s_algorithm_3_written_out(
    make: Any, options: Any, optimizer: Any, width: int, engine: Any, sampled: Any, common: bool, monkeypatch: Any
) -> None:
    if common:  # all clocks agree, but the schedule treats them as different
        monkeypatch.setattr("cfl.data.schedule.rounds_of_clients", lambda rounds, *_: np.array([rounds] * 3))
    data = data_of(split(3, classes=6), width, rounds_per_task=3, clients_per_round=sampled, clock_spread=0.67)
    clocks = rounds_of_clients([3] * 3, 0.67, 3, data.seed).tolist()
    assert len({tuple(own) for own in clocks}) == 3
    method = FedWeIT(**options, keep=0.4)
    federation = fit(tiny_client(data, double(make), optimizer, {"fedweit": method}, EngineOptions(engine)), data)
    fresh = tiny_client(data, double(make), optimizer, {"fedweit": FedWeIT(**options)})
    given: dict[str, Any] = {"make_optimizer": optimizer, "exchange": "units", "lends": True}
    given["clocks"] = [[3] * 3] * 3 if common else clocks
    naive = written_out(fresh, data, make, method, {**options, "keep": 0.4}, **given)
    assert_the_same(federation, method, naive)
    lent = {task: set(naive.owners[client].lent[task]) for client in range(3) for task in range(1, 3)}
    assert common or len(set(map(frozenset, lent.values()))) > 1, "clients begin with different knowledge"
    if not common:
        return

    monkeypatch.undo()
    data = data_of(split(3, classes=6), width, rounds_per_task=3, clients_per_round=sampled)
    in_step = FedWeIT(**options, keep=0.4)
    together = fit(tiny_client(data, double(make), optimizer, {"fedweit": in_step}, EngineOptions(engine)), data)
    assert torch.equal(federation.accuracy.compute(), together.accuracy.compute())
    assert federation.channel.uplink_bytes == together.channel.uplink_bytes
    assert federation.channel.downlink_bytes == together.channel.downlink_bytes
    assert method.report().figures == in_step.report().figures
    assert method.report().rows == in_step.report().rows


@pytest.mark.parametrize("schedule", [{"clock_spread": 0.67}, {"client_dropout": 0.5}])
def test_some_communicate_only_where_all_change_tasks_together_and_nobody_drops_out(schedule: dict[str, Any]) -> None:
    data = data_of(split(3, classes=6), rounds_per_task=3, **schedule)
    with pytest.raises(ConfigError, match=r"methods\.fedweit\.communicating = 0\.5.*1 with schedule\.clock_spread"):
        fit(tiny_client(data, mlp, sgd, {"fedweit": FedWeIT(communicating=0.5)}), data)


def run(
    options: dict[str, Any], stream: Any = None, methods: Any = None, **schedule: Any
) -> tuple[FedWeIT, Federation]:
    data, method = data_of(stream, **schedule), FedWeIT(**options)
    return method, fit(tiny_client(data, double(mlp), ADAM, {"fedweit": method, **(methods or {})}), data)


def same(one: Federation, other: Federation) -> bool:
    """Return whether clients' tensors and accuracies of two runs agree bit for bit."""
    kept, expected = kept_by(one), kept_by(other)
    assert set(kept) == set(expected)
    equal = all(torch.equal(kept[c][n], value) for c, own in expected.items() for n, value in own.items())
    return equal and torch.equal(one.accuracy.compute().nan_to_num(), other.accuracy.compute().nan_to_num())


# The exchange of bases.


class Fixed(Method):
    """Replace clients' masks and bases by the given ones after local training."""

    def __init__(self, masks: Tensor, bases: Tensor) -> None:
        self.masks, self.bases = masks, bases

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Any) -> None:
        (layer,) = decomposed_layers(self.context.network)
        for position in positions:
            client = cohort.clients[position]
            cohort.parameters[layer.mask][position] = self.masks[client]
            cohort.parameters[layer.base][position] = self.bases[client].view(-1, 1)


class Received(Method):
    """Record the bases with which clients start the last round."""

    def start_clients(self, cohort: Cohort) -> None:
        (layer,) = decomposed_layers(self.context.network)
        self.bases = cohort.parameters[layer.base].detach().clone()


def test_units_are_averaged_over_those_who_send_them_and_kept_where_nobody_does() -> None:
    masks = torch.zeros(3, UNITS, dtype=torch.float64)
    for client, units in enumerate([(0, 1), (1, 2), (1, 5)]):
        masks[client, list(units)] = torch.tensor([3.0, -2.0], dtype=torch.float64)  # size decides, not sign
    bases = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64).expand(3, UNITS)
    data = tiny_data(permuted(1), num_clients=3, schedule={"rounds_per_task": 2, "cohort_width": 3})
    method, received = FedWeIT(**OPTIONS, keep=0.25), Received()
    methods = {"fixed": Fixed(masks, bases), "fedweit": method, "received": received}
    client = tiny_client(data, double(mlp), sgd, methods)
    initial = decomposed_layers(client.network)[0].weight.detach().clone()
    federation = fit(client, data)

    mean = {0: 1.0, 1: 3.0, 2: 2.0, 5: 6.0}
    final = decomposed_layers(federation.network)[0].weight
    for unit in range(UNITS):
        for client_id in range(3):
            expected = mean.get(unit, float(bases[client_id, unit]))
            assert received.bases[client_id, unit].eq(expected).all(), (client_id, unit)
        assert torch.equal(
            final[unit], torch.full((16,), mean[unit], dtype=torch.float64) if unit in mean else initial[unit]
        )
    up = 3 * 2 * (2 * 16 * 8 + 1)  # clients, rounds, two units of sixteen values, a byte that names the units
    down = 3 * (8 * 16 * 8 + 1) + 3 * (4 * 16 * 8 + 1)  # all units, then the four that somebody has sent
    assert federation.channel.uplink_bytes == {"base": up}
    assert federation.channel.downlink_bytes == {"model": 0, "base": down}
    figures = method.report().figures
    assert (figures["c2s_bytes_of_tasks"], figures["s2c_bytes_of_tasks"]) == ([up], [down])
    assert (figures["c2s_bytes_per_task"], figures["s2c_bytes_per_task"]) == (up, down)


@pytest.mark.parametrize(
    ("schedule", "options", "aggregation"),
    [
        ({"client_dropout": 0.4}, {}, "plain"),
        ({}, {"send_adaptive": False}, "modelled"),
        ({}, {"send_adaptive": False, "communicating": 0.6}, "modelled"),
    ],
    ids=["dropouts", "sums of integers", "sums of integers of some"],
)
def test_reported_bytes_are_those_of_the_channel(
    schedule: dict[str, Any], options: dict[str, Any], aggregation: Any
) -> None:
    data = tiny_data(permuted(2), num_clients=5, schedule={"rounds_per_task": 2, **schedule})
    method = FedWeIT(**OPTIONS, **options, keep=0.25)
    channel = fit(tiny_client(data, mlp, sgd, {"fedweit": method}), data, {"aggregation": aggregation}).channel
    figures = method.report().figures
    assert sum(figures["c2s_bytes_of_tasks"]) == channel.total_uplink_bytes
    assert sum(figures["s2c_bytes_of_tasks"]) == channel.total_downlink_bytes
    assert figures["c2s_bytes_per_task"] == channel.total_uplink_bytes / 2
    assert figures["s2c_bytes_per_task"] == channel.total_downlink_bytes / 2


# The knowledge base.


class Looks(Method):
    """Record the gradients of attention in every step, and the lent adaptive weights of every task."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...], Tensor | None]] = []
        self.lent: dict[int, Tensor | None] = {}

    def adjust_gradients(self, cohort: Cohort) -> None:
        (layer,) = decomposed_layers(self.context.network)
        gradient = cohort.gradients.get(layer.attention)
        self.seen.append((cohort.task, cohort.clients, None if gradient is None else gradient.clone()))
        entries = layer.parts.knowledge.entries
        self.lent[cohort.task] = None if entries is None else entries.clone()


class Ends(Method):
    """Record the adaptive weights of the clients of each task's last round."""

    def __init__(self) -> None:
        self.values: dict[int, dict[int, Tensor]] = {}

    def end_task(self, plan: RoundPlan) -> None:
        (layer,) = decomposed_layers(self.context.network)
        kept = {c: self.context.clients.get("model", c) or {} for c in plan.clients}
        self.values[plan.task] = {c: own[layer.adaptive] for c, own in kept.items()}


def test_engines_are_tried_with_a_knowledge_base_that_the_first_task_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, looks, of = [], Looks(), Trials.of

    def noting(trials: Trials, choice: EngineChoice) -> Trial:
        (layer,) = decomposed_layers(trials.network)
        tried.append((layer.parts.knowledge.entries, layer.weight.shape))
        return of(trials, choice)

    monkeypatch.setattr(Trials, "of", noting)
    data = tiny_data(permuted(2), schedule={"cohort_width": "auto"})
    fit(tiny_client(data, mlp, sgd, {"fedweit": FedWeIT(), "looks": looks}, EngineOptions("auto")), data)
    assert tried
    for entries, shape in tried:
        assert entries is not None
        assert entries.shape == (data.rounds.most_clients, *shape)
        assert not entries.any()
    assert looks.lent[0] is None
    assert looks.lent[1] is not None


def test_a_task_borrows_what_others_had_learned_when_the_last_one_ended() -> None:
    looks, ends = Looks(), Ends()
    method, federation = run({**OPTIONS, "sparsity": 0.02}, methods={"looks": looks, "ends": ends})
    assert looks.lent[0] is None
    assert all(gradient is None for task, _, gradient in looks.seen if task == 0)
    for task in (1, 2):
        lenders, lent = sorted(ends.values[task - 1]), looks.lent[task]
        assert lent is not None
        for number, client in enumerate(lenders):
            own = ends.values[task - 1][client]
            assert torch.equal(lent[number], torch.where(own.abs() > 0.02, own, 0.0))
        assert 0 < int((lent == 0).sum()) < lent.numel()
        own_entries = 0
        for at, clients, gradient in looks.seen:
            for row, client in enumerate(clients if at == task else ()):
                assert gradient is not None
                for number, lender in enumerate(lenders):
                    assert bool(gradient[row, number] == 0) == (lender == client)
                    own_entries += lender == client
        assert own_entries, "lenders train again"

    # An entry is sent as values with indices, or as all values where that is smaller, to every other client that
    # begins the task.
    sizes = {
        task: {c: min(12 * int((a.abs() > 0.02).sum()), 8 * BASE) for c, a in ends.values[task].items()}
        for task in (0, 1)
    }
    assert federation.channel.uplink_bytes["adaptive"] == sum(sum(of.values()) for of in sizes.values())
    begun = {(t, c) for r in range(6) for t, c in [(r // 2, c) for c in federation.schedule.round(r).clients] if t}
    expected = sum(size for task, c in begun for lender, size in sizes[task - 1].items() if lender != c)
    assert federation.channel.downlink_bytes["knowledge"] == expected
    assert method.report().figures["c2s_bytes_of_tasks"][2] == federation.channel.uplink_bytes["base"] / 3

    rows = [row for row in method.report().rows if row["task"] == 2]
    (layer,) = decomposed_layers(federation.network)
    for row in rows:
        lenders = sorted(ends.values[1])
        kept = federation.clients.get("model", row["client"]) or {}
        others = [lender for lender in lenders if lender != row["client"]]
        assert row["sources"] == " ".join(map(str, others))
        assert row["source_tasks"] == " ".join("1" for _ in others)
        attention = [float(kept[layer.attention][lenders.index(other)]) for other in others]
        assert [float(a) for a in row["attention"].split()] == pytest.approx(attention, rel=1e-5)
        share = (kept[layer.adaptive].abs() > 0.02).double().mean().item()
        assert row["adaptive_share"] == pytest.approx(share)


def test_masks_of_the_clients_own_let_them_send_different_units() -> None:
    """With common masks all clients send the same share ``keep`` of the units. With their own the units differ."""
    held = {}
    for draws in ("common", "own"):
        data = data_of(rounds_per_task=1, clients_per_round=3)
        method = FedWeIT(consolidation=1.0, keep=0.25, draws=draws)  # type: ignore[arg-type]
        fit(tiny_client(data, double(mlp), partial(torch.optim.Adam, lr=1e-5), {"fedweit": method}), data)
        held[draws] = sum(int(units.sum()) for units in method._sent.values())
    assert held["common"] == UNITS // 4
    assert held["own"] > held["common"]


def test_only_the_largest_adaptive_weights_of_all_layers_are_sent() -> None:
    """The largest tenth of both layers' 128 + 48 weights together are 18."""
    lent: dict[int, list[Tensor]] = {}
    ends: dict[int, list[dict[str, Tensor]]] = {}

    class Watch(Method):
        def adjust_gradients(self, cohort: Cohort) -> None:
            entries = [layer.parts.knowledge.entries for layer in decomposed_layers(self.context.network)]
            lent[cohort.task] = [values.clone() for values in entries if values is not None]

        def end_task(self, plan: RoundPlan) -> None:
            ends[plan.task] = [dict(self.context.clients.get("model", client) or {}) for client in plan.clients]

    options = {**OPTIONS, "top_kappa": 0.1, "threshold": 0.0}
    data, method = data_of(), FedWeIT(**options)
    methods = {"fedweit": method, "watch": Watch()}
    federation = fit(tiny_client(data, double(partial(MLP, hidden=[8, 6])), ADAM, methods), data)
    layers, shares = decomposed_layers(federation.network), set()
    for task in (1, 2):
        for number, model in enumerate(ends[task - 1]):
            own = [model[layer.adaptive] for layer in layers]
            least = torch.cat([values.abs().flatten() for values in own]).sort(descending=True).values[17]
            for found, values in zip(lent[task], own, strict=True):
                assert torch.equal(found[number], torch.where(values.abs() >= least, values, 0.0))
            shares.add(tuple(int((found[number] != 0).sum()) for found in lent[task]))
    assert shares - {(13, 5)}, "layers do not send a tenth each"
    assert federation.channel.uplink_bytes["adaptive"] == 4 * 18 * 12


def test_masks_biases_and_attention_start_with_a_variance_of_one_over_their_size() -> None:
    """As from the published code's initialiser."""
    method, federation = run({**OPTIONS, "draws": "own"}, rounds_per_task=1)
    (layer,) = decomposed_layers(federation.network)
    fresh = [method._fresh(task, client) for task in range(20) for client in range(20)]
    for name, size in ((layer.mask, UNITS), (layer.bias, UNITS), (layer.attention, 2)):
        assert name is not None
        drawn = torch.stack([own[name] for own in fresh])
        assert drawn.shape == (400, size)
        assert drawn.mean().item() == pytest.approx(0, abs=5 / (20 * size))
        assert size * drawn.square().mean().item() == pytest.approx(1, abs=0.15)


def test_attention_may_start_evenly() -> None:
    starts: dict[tuple[int, int], Tensor] = {}

    class Starts(Method):
        def start_clients(self, cohort: Cohort) -> None:
            (layer,) = decomposed_layers(self.context.network)
            for row, client in enumerate(cohort.clients):
                starts.setdefault((cohort.task, client), cohort.parameters[layer.attention][row].detach().clone())

    ends = Ends()
    run({**OPTIONS, "attention": "uniform"}, methods={"starts": Starts(), "ends": ends})
    for (task, client), found in starts.items():
        if task:
            others = [float(lender != client) for lender in sorted(ends.values[task - 1])]
            assert found.tolist() == pytest.approx([o / sum(others) for o in others])
    assert any(set(found.tolist()) == {0.0, 1.0} for (task, _), found in starts.items() if task)


# Old tasks.


class Freeze(Method):
    """Bases do not move."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        for layer in decomposed_layers(self.context.network):
            cohort.gradients[layer.base].zero_()


def effective(federation: Federation, method: FedWeIT, client: int, task: int) -> tuple[Tensor, Tensor]:
    """A client's logits for a task's test images, and the decomposed weight that gives them."""
    network, data = federation.network, federation.data
    own = {n: v[0] for n, v in federation.model.personal_state((client,)).items()}
    model = method.recall(client, task, {**federation.model.state_tensors(), **own})
    x = data.tasks[task].transform(data.tasks[task].test.images)
    (layer,) = decomposed_layers(network)
    gates = torch.sigmoid(model[layer.mask]).view(-1, 1)
    return functional_call(network, model, (x,)), model[layer.base] * gates + model[layer.adaptive]


@pytest.mark.parametrize("sequences", [None, FixedTasks([[0, 1, 2], [1, 2, 0], [2, 0, 1]])], ids=["common", "own"])
def test_old_tasks_are_answered_as_before_while_bases_do_not_move(sequences: FixedTasks | None) -> None:
    """Also if clients learn different tasks at the same time. Tasks are numbered by the client's own sequence."""
    answers: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    class Asks(Method):
        def end_task(self, plan: RoundPlan) -> None:
            for client in range(3):
                for task in range(plan.task + 1):
                    answers[plan.task, client, task] = effective(self.context._federation, method, client, task)

    schedule = {"rounds_per_task": 2, "cohort_width": 2}
    data = tiny_data(split(3, classes=6), num_clients=3, sequences=sequences, schedule=schedule)
    method = FedWeIT(**{**FROZEN, "sparsity": 0.02}, send_base=False)
    methods = {"fedweit": method, "freeze": Freeze(), "asks": Asks()}
    federation = fit(tiny_client(data, double(mlp), ADAM, methods), data)
    for client in range(3):
        for task in range(3):
            for after in range(task + 1, 3):
                for one, other in zip(answers[after, client, task], answers[task, client, task], strict=True):
                    assert torch.equal(one, other)
        assert not torch.allclose(answers[2, client, 2][1], answers[2, client, 1][1], atol=1e-3)
    matrix = federation.accuracy.compute()
    assert torch.equal(matrix[:, 2, 0], matrix[:, 0, 0])


# One part left out at a time (the paper's Table 6).


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({"send_base": False}, {"base"}),
        ({"send_adaptive": False}, {"adaptive", "knowledge"}),
        ({"use_adaptive": False}, {"adaptive", "knowledge"}),
        ({"use_mask": False}, set()),
    ],
    ids=["base", "sending adaptive", "adaptive", "mask"],
)
def test_what_is_left_out_is_not_sent(options: dict[str, bool], absent: set[str]) -> None:
    _, whole = run(OPTIONS)
    method, federation = run({**OPTIONS, **options})
    sent = set(federation.channel.uplink_bytes) | set(federation.channel.downlink_bytes)
    assert sent == {"model", "base", "adaptive", "knowledge"} - absent
    assert not same(federation, whole)
    if options == {"use_mask": False}:
        assert federation.channel.uplink_bytes["base"] == 6 * 2 * BASE * 8
    size = method.report().figures["model_bytes"]
    assert 3 * BASE * 8 <= size <= whole.methods["fedweit"].report().figures["model_bytes"] * 1.1
    assert (size == 3 * BASE * 8) == (options == {"use_adaptive": False})


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("left_out", "options", "make", "optimizer", "engine"),
    [
        ("send_base", OPTIONS, mlp, ADAM, "vmap"),
        ("send_adaptive", SPARSE, ConvNet, MOMENTUM, "workers"),
        ("use_adaptive", OPTIONS, mlp, MOMENTUM, "vmap"),
        ("use_mask", OPTIONS, mlp, ADAM, "workers"),
        ("use_mask", {**FROZEN, "base_mean": "clients"}, ConvNet, sgd, "vmap"),
    ],
)
def test_a_run_without_one_part_is_the_one_written_out(
    left_out: str, options: dict[str, Any], make: Any, optimizer: Any, engine: Any, width: int
) -> None:
    data = data_of(None, width)
    method = FedWeIT(**options, **{left_out: False}, keep=0.4)
    federation = fit(tiny_client(data, double(make), optimizer, {"it": method}, EngineOptions(engine)), data)
    fresh = tiny_client(data, double(make), optimizer, {"it": FedWeIT(**options, **{left_out: False})})
    run: dict[str, Any] = {"make_optimizer": optimizer, "exchange": "none" if left_out == "send_base" else "units"}
    run["lends"] = "adaptive" not in left_out
    assert_the_same(federation, method, written_out(fresh, data, make, method, {**options, "keep": 0.4}, **run))
    parts = {name.partition(" ")[0] for name in renamed(method._fresh(1, 0))}
    assert {"mask", "adaptive", "attention"} - parts == {
        "use_adaptive": {"adaptive", "attention"},
        "send_adaptive": {"attention"},
        "use_mask": {"mask"},
    }.get(left_out, set())


def test_the_size_is_that_of_what_is_not_zero() -> None:
    """Counted by hand for every client: the base, and the adaptive weights of all its tasks above the threshold."""
    for retroactive in (True, False):
        method, federation = run({**OPTIONS, "sparsity": 0.05, "retroactive": retroactive})
        (layer,) = decomposed_layers(federation.network)
        entries = 0
        for client, own in kept_by(federation).items():
            entries += BASE + int((own[layer.adaptive].abs() > 0.05).sum())
            for task in range(3):
                filed = method._tasks.stored(client, task)
                if filed is not None:
                    earlier = own[layer.earlier][task] if retroactive else filed[layer.adaptive]
                    entries += int((earlier.abs() > 0.05).sum())
        assert method.report().figures["model_bytes"] == 8 * entries


def test_who_is_not_sampled_when_its_task_ends_counts_too() -> None:
    """With clocks of their own a client's task may end in a round in which nobody of its group takes part."""
    data = data_of(split(3, classes=6), 1, rounds_per_task=4, clients_per_round=1, clock_spread=0.6)
    method = FedWeIT(**OPTIONS)
    federation = fit(tiny_client(data, double(mlp), ADAM, {"fedweit": method}), data)
    trained = set(federation.clients.holders("model"))
    assert len(trained) == 3
    ends = {client: rounds_of_clients([4] * 3, 0.6, 3, data.seed)[client].cumsum(0).tolist() for client in trained}
    plans = federation.schedule
    assert any(client not in plans.round(end - 1).clients for client in trained for end in ends[client])
    last = dict(zip(sorted(trained), method._tasks.latest(sorted(trained)), strict=True))
    assert {(row["client"], row["task"]) for row in method.report().rows} >= set(last.items())
    assert set(method._client_bytes) == trained


# What is refused.


def test_nothing_is_left_for_a_proximal_term() -> None:
    data = data_of()
    with pytest.raises(ConfigError, match="mu"):
        fit(tiny_client(data, mlp, sgd, {"fedweit": FedWeIT(), "prox": FedProx(0.1)}), data)


def test_the_next_lenders_are_those_of_the_next_round_with_clients() -> None:
    """With Poisson sampling the round after a task may have none."""
    schedule = {"rounds_per_task": 2, "sampling": "poisson", "clients_per_round": 1}
    for seed in range(40):
        data = tiny_data(permuted(2), num_clients=3, seed=seed, schedule=schedule)
        rounds = [data.rounds.round(number).clients for number in range(4)]
        if rounds[1] and not rounds[2] and rounds[3] and {*rounds[3]} & {*rounds[0], *rounds[1]}:
            break
    else:
        raise AssertionError("no seed has a round without clients after the first task")
    method = FedWeIT(lenders="next_round")
    lent = fit(tiny_client(data, mlp, sgd, {"fedweit": method}), data).channel.uplink_bytes
    assert lent["adaptive"] > 0
