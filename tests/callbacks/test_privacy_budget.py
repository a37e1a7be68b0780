"""Privacy budgets: epsilons in the run folder, and runs that end before their budget is exceeded."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support import tiny_cli
from support.tiny import fit, tiny_client, tiny_data

from cfl.callbacks import FederatedOrchestrator, RunRecord, privacy_budget
from cfl.callbacks.accuracy_targets import AccuracyTargets
from cfl.callbacks.printed_figures import print_figures
from cfl.callbacks.privacy_budget import UNITS, PrivacyBudget, not_covered, reaches_back
from cfl.data.schedule import RoundPlan
from cfl.federation.channel import UPDATE
from cfl.methods import DER, EWC, FOT, DPFedAvg, FedProx, Method, PersonalLayers
from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.privacy.accounting import Accountant, Spent
from cfl.privacy.release import Noise
from cfl.reporting.experiment import config_hash, differences_on_resuming, experiment_of
from cfl.runtime.errors import ConfigError

pytest.importorskip("dp_accounting")

NOISY = (
    *("--methods.dp", "DPFedAvg", "--methods.dp.clip", "0.5", "--methods.dp.noise_multiplier", "2.0"),
    *("--schedule.clients_per_round", "4"),
)
BY_RDP = ("--privacy.accountant", "rdp")


def budget(epsilon: float) -> tuple[str, ...]:
    return "--privacy.budget", str(epsilon), *BY_RDP


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a budget: two tasks of three rounds, with all four clients in each round."""
    folder = tmp_path_factory.mktemp("privacy") / "whole"
    assert tiny_cli.fit(folder, *NOISY, *BY_RDP) == 0
    return folder


@pytest.fixture(scope="module")
def stopped(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with a budget that is enough for five of its six rounds."""
    folder = tmp_path_factory.mktemp("privacy") / "stopped"
    assert tiny_cli.fit(folder, *NOISY, *budget(after(whole, 5) * 1.001)) == 0
    return folder


def after(folder: Path, rounds: int) -> float:
    """Return epsilon after the first ``rounds`` rounds of a run with all clients in each round."""
    releases = tiny_cli.checkpoint(folder)["federation"]["channel"]["ledger"]["releases"]
    return Accountant(1e-5, "rdp").epsilon(Spent(sum(noise[0] ** -2 for _, _, _, noise, _, _ in releases[:rounds])))


def test_the_time_left_is_that_of_the_rounds_that_the_budget_allows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock is simulated: a round takes 40 s, and the budget is enough for five of six rounds."""
    now, start = [0.0], FederatedOrchestrator.on_train_epoch_start

    def slow_start(*arguments: Any) -> None:
        now[0] += 40.0
        start(*arguments)

    monkeypatch.setattr("cfl.callbacks.progress.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(FederatedOrchestrator, "on_train_epoch_start", slow_start)
    options = *NOISY, *budget(after(whole, 5) * 1.001), "--progress.plain_seconds", "0"
    assert tiny_cli.fit(tmp_path, *options) == 0
    assert re.findall(r"  left (\S+)", capsys.readouterr().out) == ["2:40", "2:00", "1:20", "0:40", "0:00"]


def test_a_run_says_what_its_sums_cost(whole: Path) -> None:
    summary, rows = tiny_cli.summary(whole), tiny_cli.rows(whole / "privacy.csv")
    assert summary["epsilon_per_release"] == after(whole, 1)
    assert summary["epsilon_all_tasks"] == after(whole, 6)
    assert after(whole, 1) < summary["epsilon_one_task"] < summary["epsilon_all_tasks"]
    assert summary["privacy"] | {"units": UNITS} == summary["privacy"]
    assert summary["privacy"]["not_covered"] == []
    assert summary["privacy"]["later_tasks_use_earlier_data"] == []
    assert [(row["round"], row["task"], row["topic"], row["clients"]) for row in rows] == [
        (str(r), str(r // 3), "update", "4") for r in range(6)
    ]
    for row in rows:
        noise = [float(row[key]) for key in ("sensitivity", "noise_multiplier", "parts", "epsilon_per_release")]
        assert noise == [0.5, 2.0, 1.0, summary["epsilon_per_release"]]
        assert (row["noise_by"], row["sampling_rate"]) == ("server", "")
    assert [row["epsilon_all_tasks"] != "" for row in rows] == [False, False, True] * 2
    assert float(rows[2]["epsilon_all_tasks"]) == after(whole, 3)
    assert float(rows[5]["epsilon_one_task"]) == summary["epsilon_one_task"]
    assert "privacy.csv" in (whole / "SHA256SUMS").read_text()
    assert "stopped_early" not in summary


def test_a_run_without_noise_says_nothing(tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path / "run", "--methods.prox", "FedProx") == 0
    assert not {"privacy", *UNITS} & set(tiny_cli.summary(tmp_path / "run"))
    assert not (tmp_path / "run" / "privacy.csv").exists()


# The budget.


def test_a_run_ends_before_its_budget_is_exceeded_and_is_evaluated_there(whole: Path, stopped: Path) -> None:
    assert after(whole, 5) < after(whole, 6)
    summary, rows = tiny_cli.summary(stopped), tiny_cli.rows(stopped / "rounds.csv")
    assert summary["rounds"] == 5
    assert summary["stopped_early"] is True
    assert summary["epsilon_all_tasks"] == after(whole, 5)
    before = tiny_cli.rows(whole / "rounds.csv")
    for ours, theirs in zip(rows, before, strict=False):
        assert ours["loss"] == theirs["loss"]
    assert rows[4]["acc"] != ""
    assert before[4]["acc"] == ""
    assert summary["acc"] == float(rows[4]["acc"])
    assert len(tiny_cli.rows(stopped / "privacy.csv")) == 5
    assert tiny_cli.checkpoint(stopped)["federation"]["stopped"] is True


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_run_that_stops_before_its_last_task_logs_no_final_figures(whole: Path, tmp_path: Path, rounds: int) -> None:
    """``final/acc`` is a mean over all tasks: a run that stopped in task 0 of 2 has none, as in comparisons."""
    logger = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", ".")
    assert tiny_cli.fit(tmp_path / "run", *NOISY, *budget(after(whole, rounds) * 1.001), *logger) == 0
    *_, last = tiny_cli.rows(tmp_path / "run" / "lightning_logs" / "version_0" / "metrics.csv")
    assert int(last["round"]) == rounds - 1
    assert float(last["cl/acc"]) == tiny_cli.summary(tmp_path / "run")["acc"]
    assert ("final/acc" in last) is (rounds > 3)


def test_a_stopped_run_is_not_resumed_and_says_why(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = (stopped / "summary.json").read_bytes()
    assert tiny_cli.run("fit", "--config", str(stopped / "config.yaml"), "--ckpt_path", "last") == 0
    assert "the run stopped after 5 rounds, as another round would exceed privacy.budget" in capsys.readouterr().out
    assert (stopped / "summary.json").read_bytes() == kept


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    spent = tiny_cli.summary(stopped)["epsilon_all_tasks"]
    options = ("--config", str(tiny_cli.TINY), "--run.dir", str(folder), *NOISY, *budget(spent * 1.001))
    assert tiny_cli.killed("training", 3, "fit", *options) == -9
    assert tiny_cli.run("fit", *options, "--ckpt_path", "last") == 0
    tiny_cli.assert_same(tiny_cli.results(folder), tiny_cli.results(stopped))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*NOISY, *budget(0.5)), r"privacy.budget = 0.5 cannot work; valid: null or at least 2.\d+, which the first"),
        (budget(5.0), r"privacy.budget = 5.0 cannot work; valid: null: no method of this run adds noise"),
        ((*NOISY, "--privacy.delta", "0"), r"privacy.delta = 0.0 cannot work; valid: a number in \(0, 1\)"),
    ],
    ids=["too small", "no noise", "delta"],
)
def test_refused_before_training(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_cli.fit(tmp_path / "run", *options) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run" / "rounds.csv").exists()


def test_without_the_library_a_budget_is_refused_and_figures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy_budget, "is_installed", lambda: False)
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"privacy.budget.*pip install 'continual-fl\[privacy\]'"):
        fit(tiny_client(data, methods={"dp": DPFedAvg()}), data, callbacks=[PrivacyBudget(5.0)])
    recorded = PrivacyBudget()
    summary = recorded.summary(fit(tiny_client(data, methods={"dp": DPFedAvg()}), data, callbacks=[recorded]))
    assert [summary[figure] for figure in UNITS] == [None] * 3
    assert "pip install" in summary["privacy"]["accountant"]


def test_only_a_budget_makes_another_experiment(whole: Path) -> None:
    config = yaml.safe_load((whole / "config.yaml").read_text())
    experiment = experiment_of(config)
    other = copy.deepcopy(config)
    other["privacy"]["delta"] = 1e-6
    assert config_hash(experiment_of(other)) == config_hash(experiment)
    hashes = set()
    for epsilon in (3, 3.0, 4.0):
        other["privacy"]["budget"] = epsilon
        hashes.add(config_hash(experiment_of(other)))
        (line, *_) = differences_on_resuming(experiment_of(other), experiment)
        assert line.startswith("privacy.")
    assert len(hashes | {config_hash(experiment)}) == 3


def test_the_budget_is_kept_by_several_releases_of_a_round() -> None:
    """A run stops before a round whose several releases would exceed the budget together.

    FOT's sketches are released after a task's last round, in addition to its update.
    """
    one = Accountant(1e-5, "rdp")
    noise = GaussianMechanism(1.0, 1e-3)
    multiplier = noise.noise(2, "sampled", "").multiplier
    for spare, rounds in ((1.001, 3), (0.999, 2)):
        limit = PrivacyBudget(spare * one.epsilon(Spent(3 / 4 + 2 * multiplier**-2)), accountant="rdp")
        data = tiny_data()
        methods: dict[str, Method] = {"dp": DPFedAvg(0.5, 2.0), "fot": FOT(mechanism=GaussianMechanism(1.0, 1e-3))}
        federation = fit(tiny_client(data, methods=methods), data, callbacks=[limit])
        assert federation.round == rounds
        topics = [release.topic for release in federation.channel.ledger.releases]
        assert topics == ["update"] * rounds + ["fot sketch"] * (rounds == 3)


@pytest.mark.parametrize("model", ["global", "local"])
def test_noise_that_is_lost_with_its_clients_costs_rounds(model: Any) -> None:
    """If clients drop out, a run with a budget has fewer rounds.

    Half of the clients add half of the noise to the sum of sketches, which doubles its share of the budget.
    """
    one, noise = Accountant(1e-5, "rdp"), GaussianMechanism(1.0, 1e-3)
    multiplier = noise.noise(2, "sampled", "").multiplier
    budget = 1.001 * one.epsilon(Spent(6 / 4 + 2 * multiplier**-2))
    for lost, rounds in ((0.0, 6), (0.5, 5)):
        data = tiny_data(schedule={"client_dropout": lost})
        fot = FOT(gpse_model=model, mechanism=GaussianMechanism(1.0, 1e-3))
        methods: dict[str, Method] = {"dp": DPFedAvg(0.5, 2.0), "fot": fot}
        limit = PrivacyBudget(budget, accountant="rdp")
        federation = fit(tiny_client(data, methods=methods), data, callbacks=[limit])
        assert federation.round == rounds
        spent = 3 / 4 + 2 * multiplier**-2 / (1 - lost) + (rounds - 3) / 4
        assert limit.summary(federation)["epsilon_all_tasks"] == pytest.approx(one.epsilon(Spent(spent)))


@pytest.mark.parametrize("every", [0, 2])
def test_the_last_round_is_evaluated_where_lost_noise_makes_it_the_last(every: int, tmp_path: Path) -> None:
    """Clients add the noise, half of the messages are lost, and only then is a round found to be the last."""

    class NoisyClients(DPFedAvg):
        def releases(self, plan: RoundPlan) -> dict[str, Noise]:
            return {UPDATE: Noise(self.noise_multiplier, self.clip, "clients")}

    data = tiny_data(schedule={"rounds_per_task": 8, "client_dropout": 0.5, "evaluate_every": every})
    limit = PrivacyBudget(Accountant(1e-5, "rdp").epsilon(Spent(6.5 / 4)), accountant="rdp")
    record = RunRecord(str(tmp_path / "run"))
    federation = fit(tiny_client(data, methods={"mine": NoisyClients(0.5, 2.0)}), data, callbacks=[limit, record])
    assert federation.stopped
    assert federation.round == federation.schedule.ends_after == 3
    evaluated = [value is not None for value in federation.curve]
    assert evaluated == [False, every == 2, True]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["acc"] == pytest.approx(federation.curve[-1])
    rows = [*csv.DictReader((tmp_path / "run" / "rounds.csv").open())]
    assert [bool(row["acc"]) for row in rows] == evaluated


def test_the_table_has_all_releases_of_a_run_that_stops_between_evaluations(tmp_path: Path) -> None:
    """With clocks of their own clients are evaluated where their tasks end, which the last round need not be."""

    class AtOwnPace(DPFedAvg):
        client_clocks = True

    data = tiny_data(schedule={"rounds_per_task": 6, "clock_spread": 0.3})
    ends = {round for round in range(data.rounds.num_rounds) if data.rounds.due(data.rounds.round(round))}
    last = next(round for round in range(min(ends) + 1, data.rounds.num_rounds) if round not in ends)
    limit = PrivacyBudget(1.001 * Accountant(1e-5, "rdp").epsilon(Spent((last + 1) / 4)), accountant="rdp")
    record = RunRecord(str(tmp_path / "run"))
    federation = fit(tiny_client(data, methods={"mine": AtOwnPace(0.5, 2.0)}), data, callbacks=[limit, record])
    assert federation.stopped
    assert federation.round == last + 1
    rows = tiny_cli.rows(tmp_path / "run" / "privacy.csv")
    assert [int(row["round"]) for row in rows] == list(range(last + 1))
    assert tiny_cli.summary(tmp_path / "run")["privacy"]["releases"] == len(rows)
    assert float(rows[-1]["epsilon_all_tasks"]) == tiny_cli.summary(tmp_path / "run")["epsilon_all_tasks"]


# What figures cover.


@pytest.mark.parametrize(
    ("message", "beside"), [("sketch", ["fot sketch: numbers beside the noisy tensors"]), ("covariance", [])]
)
def test_messages_with_noise_beside_updates_without(
    message: Any, beside: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What epsilons do not cover is printed directly below them."""
    data = tiny_data(schedule={"rounds_per_task": 1})
    methods = {"fot": FOT(message=message, mechanism=GaussianMechanism(5.0, 1e-5, sigma_rule="paper"))}
    federation = fit(tiny_client(data, methods=methods), data)
    (release,) = federation.channel.ledger.releases
    assert (release.topic, release.task, release.clients) == (f"fot {message}", 0, (0, 1, 2, 3))
    # With C clients each adds N(0, log(1.25 / delta) / (epsilon^2 C)) to each of two layers.
    assert release.noise.multiplier == pytest.approx(math.sqrt(math.log(1.25 / 1e-5)) / 5, rel=1e-12)
    assert release.noise.parts == 2
    assert not_covered(federation) == ["update: the models are averaged without noise", *beside]
    print_figures(federation, AccuracyTargets(), PrivacyBudget())
    lines = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("epsilon "))
    assert [line.partition(" (")[0][:8] for line in lines[first : first + 3]] == ["epsilon "] * 3
    expected = [f"epsilon does not cover {what}" for what in not_covered(federation)]
    assert lines[first + 3 : first + 3 + len(expected)] == expected
    assert reaches_back(federation) == []  # FOT remembers released bases only, no data


@pytest.mark.parametrize(
    ("methods", "data", "expected"),
    [
        ({}, {}, []),
        ({"prox": FedProx(0.1)}, {}, []),
        ({"der": DER(4)}, {}, ["methods.der"]),
        ({"ewc": EWC(1.0)}, {}, ["methods.ewc"]),
        ({"own": PersonalLayers(["head.*"])}, {}, ["what clients keep from round to round"]),
        ({}, {"exposure": "cumulative"}, ["data.exposure = cumulative"]),
    ],
    ids=["plain", "fedprox", "der", "ewc", "personal", "cumulative"],
)
def test_later_tasks_use_earlier_data_where_clients_keep_or_train_on_them(
    methods: dict[str, Any], data: dict[str, Any], expected: list[str]
) -> None:
    made = tiny_data(schedule={"rounds_per_task": 1}, **data)
    federation = fit(tiny_client(made, methods={**methods, "dp": DPFedAvg(0.1, 2.0)}), made)
    assert reaches_back(federation) == expected
    summary = PrivacyBudget(accountant="rdp").summary(federation)
    assert summary["privacy"]["later_tasks_use_earlier_data"] == expected
    assert (summary["epsilon_one_task"] == summary["epsilon_all_tasks"]) == bool(expected)
    json.dumps(summary)
