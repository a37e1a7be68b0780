"""Clients with their own numbers of rounds per task: each client's task in each round, and runs of such clients."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from support import tiny_cli
from support.naive import accuracy
from support.tiny import (
    Poison,
    SaveAfter,
    double,
    kept_by,
    mlp,
    permuted,
    runs_in_double,
    split,
    tiny_client,
    tiny_data,
    tiny_trainer,
    weights,
)
from torch.func import functional_call
from torchmetrics.classification import MulticlassF1Score

from cfl.callbacks import run_pictures
from cfl.callbacks.metric_logging import DashboardLog
from cfl.data.client_clocks import rounds_of_clients
from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Joining
from cfl.data.partitions import Dirichlet
from cfl.data.round_loader import RoundLoader
from cfl.data.schedule import BoundSchedule, RoundPlan, Schedule
from cfl.data.sequences import FixedTasks
from cfl.federation import matrix_rows
from cfl.federation.federation import Federation
from cfl.methods import (
    AGEM,
    DER,
    EWC,
    FOT,
    GLFC,
    SCAFFOLD,
    FedAGEM,
    FedCurv,
    FedProx,
    FedWeIT,
    LearningRateDecay,
    Method,
    PersonalLayers,
)
from cfl.metrics.measures.accuracy import ACCURACY
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError

SPREAD = 0.67
EVERYONE = [np.arange(6)] * 3


def test_rounds_are_uniform_around_the_schedules_and_keyed_by_client() -> None:
    drawn = rounds_of_clients([4, 10], 0.5, 3000, seed=1)
    for task, (least, most) in enumerate([(2, 6), (5, 15)]):
        counts = np.bincount(drawn[:, task] - least)
        assert len(counts) == most - least + 1
        expected = 3000 / len(counts)
        assert ((counts - expected) ** 2 / expected).sum() < 3 * len(counts), "chi-square"
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.1
    assert np.array_equal(rounds_of_clients([4, 10], 0.5, 5, seed=1), drawn[:5]), "others change nobody's clock"
    assert not np.array_equal(rounds_of_clients([4, 10], 0.5, 5, seed=2), drawn[:5])
    assert rounds_of_clients([1, 7], 0.0, 4, 0).tolist() == [[1, 7]] * 4
    assert rounds_of_clients([1], 0.99, 500, 0).min() == 1
    assert set(rounds_of_clients([10], 0.3, 500, 0).ravel().tolist()) == set(range(7, 14)), "rounding leaves no end out"


CLOCKS = {
    0: np.array([[2, 6, 2], [1, 4, 1], [1, 4, 3], [2, 3, 2], [2, 2, 2], [4, 5, 1]]),
    1: np.array([[1, 3, 1], [3, 2, 2], [2, 5, 3], [3, 2, 2], [4, 4, 2], [1, 2, 2]]),
}
"""By seed: the rounds per task that six clients draw around 3, 4 and 2 rounds with ``SPREAD``."""
CLOCKS_OF_RUNS = np.array([[2, 5, 3], [1, 3, 2], [1, 3, 4], [2, 2, 3]])
"""The rounds per task that the four clients of the runs below draw around 3 rounds, with seed 0."""


def bound(seed: int = 0, **options: Any) -> BoundSchedule:
    settings: dict[str, Any] = {"rounds_per_task": [3, 4, 2], "clients_per_round": 1.0, "clock_spread": SPREAD}
    return Schedule(**{**settings, **options}).bind(EVERYONE, seed)


@pytest.mark.parametrize("seed", CLOCKS)
def test_every_client_counts_its_own_rounds(seed: int) -> None:
    schedule, clocks = bound(seed), CLOCKS[seed]
    left = {client: list(clocks[client]) for client in range(6)}
    at = dict.fromkeys(range(6), 0)
    started = dict.fromkeys(range(6), 0)
    for number in range(schedule.num_rounds):
        plan = schedule.round(number)
        learning = [client for client in range(6) if at[client] < 3]
        assert plan.clients == tuple(learning)
        assert plan.task == min(at.values())
        assert sorted(client for part in plan.parts for client in part.clients) == learning
        for part in plan.parts:
            for client in part.clients:
                assert part.task == at[client] == schedule.task_at(number, client)
                assert part.round_in_task == number - started[client]
                assert schedule.began(part.task, client) == started[client]
                assert part.last_of_task == (left[client][part.task] == 1)
        due = []
        for client in learning:
            left[client][at[client]] -= 1
            if left[client][at[client]] == 0:
                due.append(client)
                at[client] += 1
                started[client] = number + 1
        assert schedule.due(plan) == due
        assert schedule.evaluates_after(plan) == bool(due)
        assert plan.last_of_task == schedule.row_is_whole(plan) == (min(at.values()) > plan.task)
    assert set(at.values()) == {3}, "the last round is the last client's last"
    assert schedule.num_rounds == clocks.sum(1).max()
    assert sum(schedule.rounds_of(task) for task in range(3)) == schedule.num_rounds
    assert schedule.task_at(schedule.num_rounds - 1, int(clocks.sum(1).argmin())) == 2, "who is through stays there"


def test_a_round_samples_from_those_who_still_learn() -> None:
    schedule, ends = bound(clients_per_round=4), CLOCKS[0].sum(1)
    for number in range(schedule.num_rounds):
        learning = [client for client in range(6) if ends[client] > number]
        clients = schedule.round(number).clients
        assert len(clients) == min(4, len(learning))
        assert set(clients) <= set(learning)
    half = bound(clients_per_round=0.5)
    learning = [sum(ends > number) for number in range(half.num_rounds)]
    assert [len(half.round(n).clients) for n in range(half.num_rounds)] == [max(1, round(0.5 * n)) for n in learning]


def test_whose_task_ends_is_asked_of_all_clients_at_once() -> None:
    """It is asked several times in a round, of all clients of the federation."""
    looks = 0

    class Counted(np.ndarray):
        def __getitem__(self, place: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(place)

    schedule = Schedule(rounds_per_task=6, clients_per_round=4, clock_spread=SPREAD).bind([np.arange(500)] * 3, 0)
    assert schedule._own_ends is not None
    schedule._own_ends = schedule._own_ends.view(Counted)
    plan = schedule.round(5)
    looks = 0
    assert schedule.evaluates_after(plan)
    assert looks < 10


def test_without_spread_nothing_is_as_if_clocks_agreed() -> None:
    """Client clocks that all agree give the same rounds as a schedule without client clocks."""
    plain = Schedule(rounds_per_task=[3, 4, 2], clients_per_round=4).bind(EVERYONE, 0)
    agreeing = BoundSchedule(plain.settings, EVERYONE, 0, np.array([[3, 4, 2]] * 6))
    assert not plain.client_clocks
    assert agreeing.client_clocks
    for number in range(9):
        one, other = plain.round(number), agreeing.round(number)
        assert one.parts == (one,)
        assert other.parts == (one,)
        assert plain.due(one) == agreeing.due(other)
        assert plain.row_is_whole(one) == agreeing.row_is_whole(other) == one.last_of_task


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Schedule(clock_spread=1.0), "schedule.clock_spread"),
        (lambda: Schedule(clock_spread=-0.1), "schedule.clock_spread"),
        (lambda: Schedule(clock_spread=0.5, evaluate_every=2), "schedule.evaluate_every"),
        (lambda: data_of(participation=Joining(2, 1)).rounds, "data.participation"),
        (lambda: data_of(exposure="cumulative"), "data.exposure"),
        (lambda: run({"ewc": EWC()}), "schedule.clock_spread"),
        (lambda: run({"fot": FOT()}), "schedule.clock_spread"),
        (lambda: run({"glfc": GLFC()}, data_of(scenario="class")), "schedule.clock_spread"),
    ],
)
def test_settings_that_cannot_work(make: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key


# Whole runs.


def data_of(width: int = 10, stream: Any = None, **options: Any) -> FederatedDataModule:
    """A data module of three tasks and four clients, no two of which draw the same numbers of rounds."""
    schedule = {"rounds_per_task": 3, "cohort_width": width, "clock_spread": SPREAD, **options.pop("schedule", {})}
    return tiny_data(split(3, classes=6) if stream is None else stream, schedule=schedule, **options)


run = runs_in_double(data_of)


@pytest.mark.parametrize("width", [1, 10])
def test_who_is_left_out_is_recorded_with_its_own_task(width: int) -> None:
    data = data_of(width)
    federation = run({"poison": Poison(2)}, data, federated={"on_bad_update": "skip"})
    rounds = [plan for plan in map(data.rounds.round, range(data.num_rounds)) if 2 in plan.clients]
    assert federation.channel.skipped == [(p.round, data.rounds.task_at(p.round, 2), 2) for p in rounds]
    assert any(plan.task != data.rounds.task_at(plan.round, 2) for plan in rounds)


def test_clients_that_exchange_nothing_are_where_they_would_be_alone() -> None:
    """A client that exchanges nothing has the accuracies of a run whose common schedule has that client's rounds."""
    together = run({"local": PersonalLayers()}).accuracy.compute()
    for client, own in enumerate(CLOCKS_OF_RUNS.tolist()):
        data = data_of(schedule={"rounds_per_task": own, "clock_spread": 0.0})
        alone = run({"local": PersonalLayers()}, data).accuracy.compute()
        assert torch.equal(together[client], alone[client])
    assert not torch.isnan(together).any()


def test_what_is_averaged_comes_from_clients_at_different_tasks() -> None:
    """A round's model is the mean of the models that clients return, even if these clients are at different tasks."""
    data = data_of(stream=permuted(3))
    trained: dict[int, dict[int, Any]] = {}
    models: list[Any] = []

    class Looks(Method):
        client_clocks = True

        def finish_clients(self, cohort: Any, positions: Any) -> None:
            rows = cohort.rows(positions, cohort.parameters)
            for row, position in enumerate(positions):
                own = {name: values[row].clone() for name, values in rows.items()}
                trained.setdefault(cohort.round, {})[cohort.clients[position]] = (cohort.task, own)

        def end_round(self, plan: RoundPlan) -> None:
            models.append({n: p.detach().clone() for n, p in self.context.network.named_parameters()})

    federation = run({"looks": Looks()}, data)
    mixed = 0
    for number, model in enumerate(models):
        tasks = {client: task for client, (task, _) in trained[number].items()}
        assert tasks == {c: data.rounds.task_at(number, c) for c in data.rounds.round(number).clients}
        mixed += len(set(tasks.values())) > 1
        for name, value in model.items():
            mean = torch.stack([own[name] for _, own in trained[number].values()]).mean(0)
            torch.testing.assert_close(value, mean, rtol=0, atol=1e-12)
    assert mixed > 2
    assert federation.channel.downlink_bytes["model"] == federation.channel.uplink_bytes["update"]

    ends = CLOCKS_OF_RUNS.cumsum(1)
    found = federation.accuracy.compute()
    network = double(mlp)(data.input_shape, data.num_outputs)
    for client, row in np.ndindex(4, 3):
        for i, task in enumerate(data.tasks):
            x = task.transform(task.test.images)
            logits = functional_call(network, models[ends[client, row] - 1], (x,))
            assert found[client, row, i] == pytest.approx(accuracy(logits, task.test.labels)), "its own task's end"


METHODS: dict[str, Any] = {
    "fedprox": lambda: {"fedprox": FedProx(0.1)},
    "head": lambda: {"head": PersonalLayers(["head.*"])},
    "fedweit": lambda: {"fedweit": FedWeIT(consolidation=1.0, keep=0.4)},
    "decay": lambda: {"fedweit": FedWeIT(consolidation=1.0), "decay": LearningRateDecay(patience=1)},
    "agem": lambda: {"agem": AGEM(4)},
    "der": lambda: {"der": DER(0.5, 0.5, 4)},
    "fed_agem": lambda: {"fed_agem": FedAGEM(4)},
    "fed_agem-all": lambda: {"prox": FedProx(0.1), "fed_agem": FedAGEM(4, clients="all", every=2)},
    "fedcurv": lambda: {"fedcurv": FedCurv(0.5)},
    "scaffold-I": lambda: {"scaffold": SCAFFOLD("I")},
    "scaffold-II": lambda: {"agem": AGEM(4), "scaffold": SCAFFOLD("II")},
}


@pytest.mark.parametrize("name", METHODS)
def test_width_does_not_matter(name: str) -> None:
    runs = []
    for width in (1, 4):
        data = data_of(width, sequences=FixedTasks([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]]), validation=0.1)
        runs.append(run(METHODS[name](), data))
    for client, own in kept_by(runs[0]).items():
        torch.testing.assert_close(kept_by(runs[1])[client], own, rtol=0, atol=1e-9)
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=0, atol=1e-9)
    assert torch.equal(runs[0].accuracy.compute(), runs[1].accuracy.compute())
    assert not torch.isnan(runs[0].accuracy.compute()).any()


@pytest.mark.parametrize("rounds", [1, 3, 5, 8])
@pytest.mark.parametrize("name", ["fedweit", "decay", "fed_agem-all"])
def test_a_run_goes_on_where_it_stopped(name: str, rounds: int, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    straight = run(METHODS[name](), data_of(validation=0.1), callbacks=[SaveAfter(rounds - 1, path)])
    resumed = run(METHODS[name](), data_of(validation=0.1), ckpt_path=path)
    assert resumed.round == straight.round > rounds
    for client, own in kept_by(straight).items():
        assert all(torch.equal(kept_by(resumed)[client][key], value) for key, value in own.items())
    assert all(torch.equal(weights(resumed)[key], value) for key, value in weights(straight).items())
    assert torch.equal(resumed.accuracy.compute(), straight.accuracy.compute())
    for key, method in straight.methods.items():
        found, expected = (
            {name: value for name, value in of.report().figures.items() if "seconds" not in name}
            for of in (resumed.methods[key], method)
        )
        assert found == expected
        assert resumed.methods[key].report().rows == method.report().rows
    assert resumed.curve == pytest.approx(straight.curve)


def test_clients_that_never_join_have_no_clock() -> None:
    with pytest.warns(UserWarning, match="client 3 takes part in none of the 3 tasks"):
        whole = run(data=data_of(participation=Joining(3, 0)))
    assert whole.finished
    found = whole.measured.compute()
    assert not found[:3, -1].isnan().any()
    assert found[3].isnan().all()


@pytest.mark.parametrize(
    ("rounds", "spread", "least"), [(3, 0.3, "1/3"), ([2, 4], 0.2, "1/4"), ([1, 2], 0.49, "1/2"), (1, 0.9, None)]
)
def test_a_spread_that_no_round_is_lost_or_gained_by_is_refused(rounds: Any, spread: float, least: str | None) -> None:
    members = [np.arange(4)] * 2
    with pytest.raises(ConfigError, match=r"schedule\.clock_spread = .*every client would have as many") as caught:
        Schedule(rounds, 2, clock_spread=spread).bind(members, 0)
    said = str(caught.value)
    assert ("or at least" in said) == (least is not None)
    if least is not None:
        assert f"or at least {least}: rounds are whole ones" in said
        one, of = map(int, least.split("/"))
        assert Schedule(rounds, 2, clock_spread=one / of).bind(members, 0).client_clocks


def validated(path: Path, measures: Any = None) -> Federation:
    """The federation after ``validate`` of a checkpoint."""
    data = data_of()
    client = tiny_client(data, double(mlp))
    trainer = tiny_trainer(data, {"measures": measures})
    trainer.validate(client, datamodule=data, ckpt_path=path, verbose=False, weights_only=True)
    return client.require_federation()


def test_validate_scores_every_client_whatever_task_it_is_at(tmp_path: Path) -> None:
    """Validating amid a run, with clients at different tasks, fills each client's row of its current task."""
    data, path = data_of(), tmp_path / "middle.ckpt"
    run(data=data, callbacks=[SaveAfter(4, path)])
    tasks = {client: data.rounds.task_at(4, client) for client in range(4)}
    assert len(set(tasks.values())) > 1
    total = validated(path).accuracy.counts
    for owner, task in tasks.items():
        assert total[owner, task].tolist() == [len(t.test) for t in data.tasks]


def test_validate_keeps_the_figures_of_clients_that_have_left(tmp_path: Path) -> None:
    """It repeats the tests of the clients that leave with the last round, and leaves what others left with as it is."""
    data, path = data_of(), tmp_path / "end.ckpt"
    recorded = run(data=data, callbacks=[SaveAfter(data.num_rounds - 1, path)])
    last = data.rounds.due(data.rounds.round(data.num_rounds - 1))
    assert 0 < len(last) < 4
    whole = torch.load(path, weights_only=True)
    assert torch.equal(validated(path).accuracy.sums, recorded.accuracy.sums)
    for of_rows in whole["federation"]["accuracy"].values():
        of_rows[last, 2] = 0
    torch.save(whole, path)
    again = validated(path)
    assert torch.equal(again.accuracy.counts, recorded.accuracy.counts)
    assert matrix_rows.figures(again, again.accuracy) == matrix_rows.figures(recorded, recorded.accuracy)


def test_validate_computes_no_measure_for_some_clients_only(tmp_path: Path) -> None:
    path, measure = tmp_path / "end.ckpt", {"f1": MulticlassF1Score(6)}
    data = data_of()
    run(data=data, callbacks=[SaveAfter(data.num_rounds - 1, path)])
    with pytest.raises(ConfigError, match=r"measures\.f1 = .*; valid: a measure that the run has computed: with sched"):
        validated(path, measure)
    measured = data_of()
    own = run(data=measured, callbacks=[SaveAfter(data.num_rounds - 1, path)], federated={"measures": measure})
    assert torch.equal(validated(path, measure).own_measures["f1"].sums, own.own_measures["f1"].sums)


def test_figures_amid_a_run_are_of_all_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures amid a run are after the last task that all clients were evaluated after. The output names this task."""
    options = ("--schedule.clock_spread", "0.7", "--schedule.clients_per_round", "1.0", "--seed_everything", "1")
    said, figures, empty = list[str](), list[str](), list[list[bool]]()
    for number in (0, 2, 3):
        folder = tmp_path / str(number)
        with tiny_cli.die_at("training", number, signal.SIGTERM):
            assert tiny_cli.fit(folder, *options) == 143
        capsys.readouterr()
        assert tiny_cli.run("validate", "--run.dir", str(folder), "--ckpt_path", "last") == 0
        printed = capsys.readouterr().out
        said += re.findall("^clients are at .*", printed, re.M)
        figures += re.findall(r"^(?:ACC|FGT) +(\S+)", printed, re.M)
        averages = re.findall(r"^│ +[01] │.*│ *([\d.]*)│$", printed, re.M)
        empty.append([value == "" for value in averages])
    assert said == [
        f"clients are at tasks {first} to {last}: figures are after task {first}, the last after which all have been "
        "evaluated"
        for first, last in ((0, 0), (0, 1), (1, 1))
    ]
    assert empty == [[False, True], [False, True], [False, False]]
    assert [value == "undefined" for value in figures] == [False, True, False, True, False, False]


def test_a_row_is_whole_when_all_have_been_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            federation = pl_module.federation
            found.append((matrix_rows.last_complete(federation), matrix_rows.figures(federation, federation.accuracy)))
            matrices.append(federation.accuracy.compute())
            means.append(matrix_rows.means(federation))
            DashboardLog._log_matrix(DummyLogger(), federation, (), 0, 0)

    def drawn_curve(*given: Any) -> Any:
        drawn.append(given[2]["FedAvg"])

    drawn, means = list[list[float]](), list[list[float]]()
    monkeypatch.setattr(run_pictures, "accuracy_curve", drawn_curve)
    data, found, matrices = data_of(), list[tuple[int | None, dict[str, Any]]](), list[torch.Tensor]()
    run(data=data, callbacks=[Asks()])
    ahead = 0
    for number, ((row, figures), matrix) in enumerate(zip(found, matrices, strict=True)):
        ended = [[data.rounds.task_at(number + 1, c) > t for c in range(4)] for t in range(2)]
        ended.append([number + 1 >= data.rounds.num_rounds] * 4)
        whole = [t for t, clients in enumerate(ended) if all(clients)]
        assert row == (whole[-1] if whole else None)
        if whole:
            assert figures["acc"] == pytest.approx(matrix[:, whole[-1], : whole[-1] + 1].mean().item())
        else:
            assert figures == dict.fromkeys(ACCURACY.formulas)
        ahead += any(ended[len(whole)]) if len(whole) < 3 else 0
        expected = [matrix[:, t, : t + 1].mean().item() for t in whole]
        assert means[number][: len(whole)] == pytest.approx(expected)
        assert all(math.isnan(value) for value in means[number][len(whole) :])
    np.testing.assert_equal(drawn, means)
    assert ahead > 1, "some are at times a task ahead of others"


def test_the_curve_has_the_mean_over_all_clients_where_the_last_of_them_ends_a_task() -> None:
    federation = run({"local": PersonalLayers()})
    schedule, matrix = federation.schedule, federation.accuracy.compute()
    known = [acc for acc in federation.curve if acc is not None]
    assert known == pytest.approx([matrix[:, t, : t + 1].mean().item() for t in range(3)])
    ends = [n for n in range(schedule.num_rounds) if schedule.round(n).last_of_task]
    assert [n for n, acc in enumerate(federation.curve) if acc is not None] == ends
    assert federation.accuracy.summary()["acc"] == pytest.approx(known[-1])


@pytest.mark.parametrize("seed", range(4))
def test_every_clients_every_task_is_noted_once(seed: int) -> None:
    """Reports note each client and task once, even if clients that began a task in different rounds end it together."""
    decay, weit = LearningRateDecay(patience=1), FedWeIT()
    run({"decay": decay, "weit": weit}, data_of(validation=0.1, seed=seed))
    tasks = [row["task"] for row in decay.report().rows for _ in range(row["clients"])]
    assert sorted(tasks) == [0] * 4 + [1] * 4 + [2] * 4
    noted = [(row["task"], row["client"]) for row in weit.report().rows]
    assert sorted(noted) == [(task, client) for task in range(3) for client in range(4)]


def test_batches_of_a_round_are_of_their_clients_tasks_in_all_processes() -> None:
    data = data_of(2, stream=permuted(3))
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        tasks = {client: data.rounds.task_at(number, client) for client in plan.clients}
        lengths, seen = set(), []
        for process in range(2):
            loader = RoundLoader(plan, data.trained_in(plan), data.schedule, 0, process, 2)
            batches = list(loader)
            lengths.add(len(batches))
            assert [batch.last_of_round for batch in batches] == [False] * (len(batches) - 1) + [True]
            for batch in batches:
                assert all(tasks[client] == batch.task for client in batch.clients)
                seen += [batch.clients[position] for position in batch.closes]
        assert sorted(seen) == sorted(plan.clients)
        assert len(lengths) == 1


def test_processes_know_which_clients_of_a_round_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a client differ by task, so that clients at different tasks are dealt by the steps of their own."""
    schedule = {"rounds_per_task": 6, "clients_per_round": 1.0, "clock_spread": 0.6, "batch_size": 2}
    partition = Dirichlet(0.3, min_samples=1)
    data = tiny_data(split(3, classes=6, train=240), num_clients=8, partition=partition, schedule=schedule)
    monkeypatch.setattr(distributed, "count", lambda: 2)
    by_task = 0
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        for process in range(2):
            monkeypatch.setattr(distributed, "rank", lambda process=process: process)
            loader = RoundLoader(plan, data.trained_in(plan), data.schedule, 0, process, 2)
            trained = sorted(batch.clients[position] for batch in loader for position in batch.closes)
            assert data.trained_here(plan) == trained
            by_task += data.own_clients(plan.task, plan.clients) == trained
    assert by_task < 2 * data.num_rounds


def test_no_end_of_the_spread_is_rounded_out() -> None:
    """The least and the greatest number of rounds are drawn even if 1 - spread and 1 + spread are inexact as floats."""
    assert set(rounds_of_clients([10], 0.7, 3000, 0).ravel().tolist()) == set(range(3, 18))
    assert rounds_of_clients([100], 0.15, 3000, 0).max() == 115
