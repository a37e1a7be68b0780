"""Clients' buffers: the samples held, the values kept with them, and the draws, compared with a loop over samples."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import tiny_cli
from support.naive_replay import (
    AFTER_THE_ROUND,
    Slot,
    filled_buffers,
    held,
    inputs,
    local_samples,
    replay_client,
    replay_data,
    word,
)
from support.tiny import Poison, fit, mlp, permuted, split, tiny_data, weights
from support.tiny_cli import printed_config
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from cfl.data.augmentation import CropFlip
from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.task_handles import unwrap_tasks
from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.federation.channel import Channel
from cfl.federation.federated_model import FederatedModel
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer, Replayed
from cfl.federation.replay_memory import RULES, slots, winners
from cfl.federation.server import Server
from cfl.methods import AGEM, DER, FedAGEM, Method
from cfl.models import MLP
from cfl.models.dropout import DropoutMasks, dropout_masks
from cfl.randomness.generators import seed_for
from cfl.reporting.experiment import config_hash, experiment_of
from cfl.runtime.errors import ConfigError


class Keep(Method):
    """A method that makes clients keep buffers, looks at ``count`` drawn samples in each step, and changes nothing."""

    replays_logits = False

    def __init__(self, count: int = 0, logits: bool = False) -> None:
        self.count, self.replays_logits = count, logits
        self.drawn: list[tuple[Cohort, CohortBatch, Replayed | None, dict[str, Tensor]]] = []

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        if self.count:
            buffer = self.context.buffer
            assert buffer is not None
            drawn = buffer.draw(cohort, batch, self.count, "look")
            table = {name: values.clone() for name, values in buffer._table.items()}
            self.look(cohort, batch, drawn, table)
        return batch

    def look(self, cohort: Cohort, batch: CohortBatch, drawn: Replayed | None, table: dict[str, Tensor]) -> None:
        """Check a draw; for subclasses."""


def run(
    data: FederatedDataModule, buffer: ReplayBuffer, keep: Keep | None = None, network: Any = mlp, **options: Any
) -> Federation:
    return fit(replay_client(data, {"keep": keep or Keep()}, network, buffer, **options), data)


# Rules.


def after(rule: Any, size: int, offered: int, keys: Tensor, cut: int) -> Tensor:
    """``[k, size]`` numbers of the samples held after ``offered`` samples in batches of ``cut``, -1 for none."""
    table, number = torch.full((len(keys), size), -1), torch.arange(offered).expand(len(keys), -1)
    for part in number.split(cut, 1):
        last = winners(slots(rule, size, part, keys), torch.ones_like(part, dtype=torch.bool), size)
        table = torch.where(last >= 0, part.gather(1, last.clamp(min=0)), table)
    return table


def chi_square(counts: Tensor) -> float:
    """Pearson's statistic against equal shares; about normal, as ``(x - n) / sqrt(2 n)``, for many cells."""
    expected = counts.sum() / counts.numel()
    return float((counts - expected).square().sum() / expected)


def test_a_reservoir_holds_every_sample_with_the_same_probability() -> None:
    size, offered, clients = 4, 32, 6000
    keys = torch.tensor([seed_for(client % 7, "buffer rule", client) for client in range(clients)])
    found = after("reservoir", size, offered, keys, 5)
    statistic = chi_square(torch.bincount(found.flatten(), minlength=offered).double())
    assert abs(statistic - (offered - size)) < 5 * (2 * offered) ** 0.5  # drawn without replacement: a little less
    # Late samples are in all slots equally often.
    late = torch.stack([(found[:, slot] >= size).sum() for slot in range(size)]).double()
    assert chi_square(late) < 25
    assert (found.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_rules_sample_by_sample(rule: str) -> None:
    """Rules give the slots of a loop over samples, in any division into batches."""
    keys, size, offered = torch.tensor([3, 2**62 + 5, 11]), 4, 37
    expected = []
    for key in keys.tolist():
        held: list[int] = []
        for n in range(offered):
            if n < size:
                held.append(n)
            elif rule == "sliding_window":
                held[n % size] = n
            elif rule == "random_replacement":
                held[word(key, n) % size] = n
            elif (j := word(key, n) % (n + 1)) < size:
                held[j] = n
        expected.append(held)
    for cut in (1, 3, 37):
        assert after(rule, size, offered, keys, cut).tolist() == expected
    if rule == "sliding_window":
        assert all(sorted(held) == list(range(offered - size, offered)) for held in expected)


def test_random_replacement_forgets_old_samples_geometrically() -> None:
    """After n more samples, a sample is still held with probability ``(1 - 1/M)^n``."""
    size, offered, clients = 4, 20, 6000
    found = after("random_replacement", size, offered, torch.arange(clients) * 977 + 1, 4)
    shares = torch.bincount(found.flatten(), minlength=offered) / clients
    ages = offered - 1 - torch.arange(offered)
    expected = (1 - 1 / size) ** ages
    expected[:size] = (1 - 1 / size) ** (offered - size)  # these came into empty slots
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / clients).sqrt() + 1e-9).all()


# A run's buffers, compared with a loop over its samples.

STREAMS: dict[str, Any] = {
    "domain": partial(replay_data),
    "task": partial(replay_data, split(3, classes=6)),
    "class": partial(replay_data, split(3, classes=6), scenario="class", class_loss="seen"),
    "cumulative": partial(replay_data, split(3, classes=6), exposure="cumulative"),
    "epochs": partial(replay_data, schedule={"local_epochs": 2}),
    "joining": partial(replay_data, permuted(3), participation=Joining(2, 2), schedule={"clients_per_round": 2}),
}


def assert_as_the_loop_says(federation: Federation, size: int, rule: str, once: bool) -> None:
    data = federation.data
    for buffer in filled_buffers(data, size, rule, once):
        assert held(federation, buffer.client) == [(slot.task, slot.index) for slot in buffer.slots]
        table = federation.clients.get("buffer", buffer.client)
        if table is not None:
            assert int(table["seen"]) == buffer.offered
            assert not once or int(table["known"].sum()) == len(buffer.known)
    assert federation.buffer is not None
    fill = federation.buffer.fill(range(data.num_clients)).tolist()
    assert fill == [len(held(federation, client)) for client in range(data.num_clients)]


@pytest.mark.parametrize("offered", ["once", "every_step"])
@pytest.mark.parametrize("stream", STREAMS)
def test_what_is_held_is_what_a_loop_over_the_samples_says(stream: str, offered: Any) -> None:
    federation = run(STREAMS[stream](), ReplayBuffer(5, offered=offered))
    assert_as_the_loop_says(federation, 5, "reservoir", offered == "once")


@pytest.mark.parametrize("rule", RULES)
def test_rules_in_a_run(rule: Any) -> None:
    assert_as_the_loop_says(run(replay_data(), ReplayBuffer(4, rule)), 4, rule, True)


def test_a_sample_is_offered_once_or_in_every_step() -> None:
    """A large buffer holds each sample once, or once for each step in which it was offered."""
    for offered, times in (("once", 1), ("every_step", 4)):  # two rounds of two epochs
        data = replay_data(schedule={"local_epochs": 2, "clients_per_round": 1.0})
        federation = run(data, ReplayBuffer(400, offered=offered))  # type: ignore[arg-type]
        for client in range(5):
            own = [(task, i) for task in range(2) for i in data.indices[task][client].tolist()]
            assert sorted(held(federation, client)) == sorted(own * times)


def test_tasks_trained_for_longer_take_more_of_the_buffer_unless_samples_are_offered_once() -> None:
    data = [replay_data(schedule={"rounds_per_task": [1, 4], "clients_per_round": 1.0}) for _ in range(2)]
    once, every = (
        run(d, ReplayBuffer(6, offered=offered)) for d, offered in zip(data, ("once", "every_step"), strict=True)
    )
    first = [[sum(task == 0 for task, _ in held(f, client)) for client in range(5)] for f in (once, every)]
    assert sum(first[0]) > sum(first[1]) + 3


class Calls(TorchFunctionMode):
    """Counts calls of torch functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Counted(ReplayBuffer):
    """Notes for each offer the number of samples, of calls of torch, and of executed lines of Python."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.offers: list[tuple[int, int, int]] = []

    def offer(self, cohort: Cohort, batch: CohortBatch, logits: Tensor | None) -> None:
        lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace if "cfl" in Path(frame.f_code.co_filename).parts else None

        before = sys.gettrace()
        try:
            with Calls() as calls:
                sys.settrace(trace)
                super().offer(cohort, batch, logits)
        finally:
            sys.settrace(before)
        self.offers.append((int(batch.mask.sum()), calls.count, lines))


@pytest.mark.parametrize("augmentation", [None, CropFlip(1)])
@pytest.mark.parametrize("offered", ["once", "every_step"])
@pytest.mark.parametrize("rule", RULES)
def test_an_offer_takes_no_python_per_sample(rule: Any, offered: Any, augmentation: CropFlip | None) -> None:
    """An offer runs as many calls and lines for batches of 64 as for batches of 4."""
    found = []
    for size in (4, 64):
        schedule = {"rounds_per_task": 1, "batch_size": size}
        data = tiny_data(permuted(train=128), num_clients=2, schedule=schedule, augmentation=augmentation)
        buffer = Counted(5, rule=rule, offered=offered)
        run(data, buffer, Keep(logits=True))
        found.append(buffer.offers[0])
    assert [samples for samples, *_ in found] == [8, 128]
    assert found[0][1:] == found[1][1:]
    assert min(found[0][1:]) > 10


# The values kept with the samples.


class Compare(Keep):
    """Checks that draws are distinct slots of the client, and that images, labels and tasks are those of the slots."""

    def __init__(self, count: int = 3, **options: Any) -> None:
        super().__init__(count, **options)
        self.seen = self.of_earlier_tasks = self.masked = self.nothing = 0
        self.draws: dict[tuple[int, int, int], list[int]] = {}

    def look(self, cohort: Cohort, batch: CohortBatch, drawn: Replayed | None, table: dict[str, Tensor]) -> None:
        data = self.context._federation.data
        if drawn is None:
            self.nothing += 1
            return
        for row, client in enumerate(cohort.clients):
            training = bool(batch.mask[row].any())
            places = table["place"][row]
            filled = int((places >= 0).sum()) if training else 0
            assert int(drawn.mask[row].sum()) == min(self.count, filled)
            self.masked += int((~drawn.mask[row]).sum())
            key = seed_for(data.seed, "buffer look", client, cohort.round, batch.step)
            order = sorted(range(filled), key=lambda slot, key=key: word(key, slot))[: self.count]  # type: ignore[misc]
            self.draws[client, cohort.round, batch.step] = order
            assert len(drawn.x[row, : len(order)].unique(dim=0)) == len(order)  # without replacement
            for column, slot in enumerate(order):
                task, index = (int(part) for part in data.global_index.split(places[slot]))
                x, y, _ = inputs(data, [self.slot_of(table, row, slot, task, index)])
                assert torch.equal(drawn.x[row, column], x[0])
                assert (int(drawn.y[row, column]), int(unwrap_tasks(drawn.tasks)[row, column])) == (int(y), task)
                self.seen += 1
                self.of_earlier_tasks += task < cohort.task
            assert drawn.x[row].isfinite().all()

    def slot_of(self, table: dict[str, Tensor], row: int, slot: int, task: int, index: int) -> Slot:
        return Slot(task, index)


@pytest.mark.parametrize("stream", ["domain", "task", "class", "cumulative"])
def test_images_labels_and_tasks_come_back_right(stream: str) -> None:
    compare = Compare()
    run(STREAMS[stream](), ReplayBuffer(5), compare)
    assert compare.seen > 50
    assert compare.of_earlier_tasks > 10
    assert compare.masked > 0
    assert compare.nothing > 0
    assert len(set(map(tuple, compare.draws.values()))) > len(compare.draws) / 2  # a draw per client, round and step


def test_draws_are_uniform_and_without_replacement() -> None:
    compare = Compare(2)
    data = replay_data(
        schedule={"rounds_per_task": [1, 12], "clients_per_round": 1.0, "batch_size": 2, "cohort_width": 5}
    )
    run(data, ReplayBuffer(5, "sliding_window"), compare)
    drawn = torch.tensor([order for (_, round, _), order in compare.draws.items() if round > 1 and len(order) == 2])
    assert len(drawn) > 300
    for column in range(2):
        assert chi_square(torch.bincount(drawn[:, column], minlength=5).double()) < 20


class Augmented(Compare):
    """Expects images as the step in which each sample was stored has augmented them."""

    def prepare(self, data: FederatedDataModule) -> Augmented:
        self.moments = {
            (client, sample.task, sample.index): sample
            for number in reversed(range(data.num_rounds))
            for client in data.rounds.round(number).clients
            for _, samples in reversed(list(local_samples(data, data.rounds.round(number), client)))
            for sample in samples
        }
        self.clients: tuple[int, ...] = ()
        return self

    def look(self, cohort: Cohort, batch: CohortBatch, drawn: Replayed | None, table: dict[str, Tensor]) -> None:
        self.clients, self.now = cohort.clients, (cohort.round, batch.step)
        super().look(cohort, batch, drawn, table)

    def slot_of(self, table: dict[str, Tensor], row: int, slot: int, task: int, index: int) -> Slot:
        return self.moments[self.clients[row], task, index]


class Anew(Augmented):
    """Expects images as the current step augments them."""

    def slot_of(self, table: dict[str, Tensor], row: int, slot: int, task: int, index: int) -> Slot:
        return Slot(task, index, *self.now)


@pytest.mark.parametrize("keeps", ["augmented", "raw"])
@pytest.mark.parametrize("exposure", ["sequential", "cumulative"])
def test_augmented_images_come_back_as_they_were_put_in_and_raw_ones_anew(keeps: Any, exposure: Any) -> None:
    data = replay_data(augmentation=CropFlip(1), exposure=exposure, schedule={"local_epochs": 2})
    compare = (Augmented if keeps == "augmented" else Anew)().prepare(data)
    federation = run(data, ReplayBuffer(5, keeps=keeps), compare)
    assert compare.seen > 100
    between, later = (
        federation.buffer.draw_between_rounds([2], round, 3, "look", torch.device("cpu"))  # type: ignore[union-attr]
        for round in (3, 4)
    )
    assert between is not None
    assert later is not None
    assert torch.equal(between.x, later.x) == (keeps == "augmented" and torch.equal(between.y, later.y))
    for column in range(3):
        task, y = int(unwrap_tasks(between.tasks)[0, column]), int(between.y[0, column])
        candidates = [moment for key, moment in compare.moments.items() if key[:2] == (2, task)]
        if keeps == "raw":
            candidates = [Slot(task, moment.index, 3, AFTER_THE_ROUND) for moment in candidates]
        images = inputs(data, candidates)
        same = (images[0] == between.x[0, column]).flatten(1).all(1)
        assert same.any()
        assert set(images[1][same].tolist()) == {y}


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "engine", [EngineOptions("vmap"), EngineOptions("workers", 1, 1, False)], ids=["vmap", "workers"]
)
def test_logits_are_those_of_the_step_of_insertion_dropout_included(engine: EngineOptions, width: int) -> None:
    """Kept logits are those of the step that stored the sample, with its dropout masks. The learning rate here is 0."""
    data = replay_data(split(3, classes=6), schedule={"cohort_width": width})
    network = partial(MLP, hidden=[8], dropout=0.5)
    still = partial(torch.optim.SGD, lr=0.0)
    federation = run(data, ReplayBuffer(5), Keep(logits=True), network, engine=engine, optimizer=still)
    masks, tensors = DropoutMasks(federation.network, data.input_shape), weights(federation)
    plain = 0
    for buffer in filled_buffers(data, 5):
        table = federation.clients.get("buffer", buffer.client)
        for place, sample in enumerate(buffer.slots):
            key = seed_for(data.seed, "dropout", sample.round, buffer.client, sample.step)
            drawn = masks.draw(torch.tensor([key]), sample.row + 1)
            dropped = {name: mask[0, sample.row :] for name, mask in drawn.items()}
            x = inputs(data, [sample])[0]
            with dropout_masks(federation.network, dropped):
                expected = functional_call(federation.network.train(), tensors, (x,))[0]
            assert table is not None
            torch.testing.assert_close(table["logits"][place], expected, rtol=1e-5, atol=1e-6)
            plain += int(torch.allclose(functional_call(federation.network.eval(), tensors, (x,))[0], expected))
    assert plain == 0


# Clients that are left out.


def table_of(federation: Federation) -> dict[str, Tensor]:
    return {
        f"{name} of {client}": values
        for client in range(federation.data.num_clients)
        for name, values in (federation.clients.get("buffer", client) or {}).items()
    }


def test_a_client_that_diverges_keeps_the_buffer_it_had() -> None:
    """With ``on_bad_update: skip``, a client with a bad update keeps its earlier buffer, without NaN logits."""

    tables = []
    for bad in ({}, {"bad": Poison(2, 1)}):
        data = replay_data(schedule={"clients_per_round": 1.0, "rounds_per_task": [1, 2]})
        client = replay_client(data, {"der": DER(), **bad}, mlp, ReplayBuffer(5))
        federation = fit(client, data, {"on_bad_update": "skip"})
        tables.append(federation)
    assert [(r, c) for r, _, c in tables[1].channel.skipped] == [(1, 2)]
    assert any(task == 1 for task, _ in held(tables[1], 2)), "it goes on in the next round"
    for name, value in table_of(tables[1]).items():
        assert value.isfinite().all(), name
    # Other clients' buffers are not affected.
    assert held(tables[0], 1) == held(tables[1], 1)
    assert tables[1].finished


# Settings and reports.


def test_storage_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage: 16 + 2 bytes of pixels, label and task for each slot, 4 for each logit, a bit for each known sample.

    The most samples of a client are known without listing any client's samples.
    """
    monkeypatch.delattr(ReplayBuffer, "_places_of")
    data = replay_data()
    most = max(sum(len(task[client]) for task in data.indices) for client in range(5))
    known = (most + 7) // 8
    for buffer, method, expected in (
        (ReplayBuffer(7), AGEM(), 7 * 18 + known),
        (ReplayBuffer(7), DER(), 7 * (18 + 4 * 4) + known),
        (ReplayBuffer(7), DER(0.0, 1.0), 7 * 18 + known),
        (ReplayBuffer(7, offered="every_step"), FedAGEM(), 7 * 18),
    ):
        federation = before_training(replay_data(), {"method": method}, buffer)
        assert federation.buffer is not None
        assert federation.buffer.client_storage() == expected
        assert federation.client_storage() == expected


def before_training(data: FederatedDataModule, methods: dict[str, Method], buffer: ReplayBuffer) -> Federation:
    data.setup("fit")
    client = replay_client(data, methods, mlp, buffer)
    model = FederatedModel(client.network, client.methods.keeps_local)
    server = Server(dict(client.network.named_parameters()), dict(client.network.named_buffers()))
    return Federation(model, data, client.methods, server, Channel(), buffer=buffer)


def test_there_is_no_buffer_where_nobody_replays() -> None:
    data = replay_data()
    federation = fit(replay_client(data, {}, mlp, ReplayBuffer(5)), data)
    assert federation.buffer is None
    assert federation.clients.state_dict() == {}
    assert federation.client_storage() == 0


def test_keeping_a_buffer_changes_nothing() -> None:
    data = replay_data()
    plain = weights(fit(replay_client(data, {}, mlp), data))
    data = replay_data()
    kept = weights(run(data, ReplayBuffer(5), Keep(3)))
    assert all(torch.equal(plain[name], kept[name]) for name in plain)


@pytest.mark.parametrize(
    ("options", "key", "value", "valid"),
    [
        ({"size": 0}, "buffer.size", 0, "from 1 to 1000000"),
        ({"rule": "herding"}, "buffer.rule", "herding", "reservoir"),
        ({"offered": "twice"}, "buffer.offered", "twice", "every_step"),
        ({"keeps": "nothing"}, "buffer.keeps", "nothing", "raw"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], key: str, value: Any, valid: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReplayBuffer(**options)
    assert (caught.value.key, caught.value.value) == (key, value)
    assert valid in str(caught.value)


def test_the_experiment_holds_the_buffer_only_where_somebody_replays() -> None:
    def config(method: str | None, size: int) -> dict[str, Any]:
        methods = {} if method is None else {"m": {"class_path": f"cfl.methods.{method}"}}
        return {"methods": methods, "buffer": {"size": size}, "model": {"buffer": {"size": size}}}

    for method in (None, "EWC", "ER"):
        one, other = (experiment_of(config(method, size)) for size in (200, 300))
        assert "buffer" not in one
        assert config_hash(one) == config_hash(other)
    for method in ("AGEM", "DER", "FedAGEM"):
        one, other = (experiment_of(config(method, size)) for size in (200, 300))
        assert one["buffer"] == {"size": 200}
        assert "buffer" not in one["model"]
        assert config_hash(one) != config_hash(other)


def test_the_command_line_sets_the_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--methods.agem", "AGEM", "--buffer.size", "7", "--buffer.rule", "sliding_window")
    config = printed_config(capsys, *given)
    expected = {"size": 7, "rule": "sliding_window", "offered": "once", "keeps": "augmented"}
    assert config["buffer"] == expected
    assert tiny_cli.fit(tmp_path / "run", *given) == 0
    kept = tiny_cli.checkpoint(tmp_path / "run")["federation"]["clients"]["buffer"]
    assert kept["fields"]["place"][1] == [7]
    resolved = (tmp_path / "run" / "config.yaml").read_text()
    assert "sliding_window" in resolved
    capsys.readouterr()
    assert tiny_cli.run("fit", *given[:2], "--buffer.size", "0") == 2
    assert "buffer.size = 0" in capsys.readouterr().err
    assert json.dumps(config)  # plain values


@pytest.mark.parametrize(("offered", "later"), [("once", False), ("every_step", True)])
def test_logits_are_wanted_only_where_a_sample_may_enter(offered: Any, later: bool) -> None:
    """Logits are computed in a client's first round of a task, or in all rounds if every step's samples are offered."""
    wanted: dict[int, bool] = {}

    class Watch(Keep):
        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            assert self.context.buffer is not None
            wanted[cohort.round] = self.context.buffer.wants_logits
            return batch

    data = replay_data(split(2, train=160), schedule={"clients_per_round": 5, "cohort_width": 5})
    run(data, ReplayBuffer(4, offered=offered), Watch(logits=True))
    assert wanted == {0: True, 1: later, 2: True, 3: later}
