"""Accuracy targets: rounds to them are those of rounds.csv, and a run that may end at its last target ends there."""

from __future__ import annotations

import copy
import io
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support import tiny, tiny_cli

from cfl.callbacks import AccuracyTargets, FederatedOrchestrator, RunRecord
from cfl.callbacks.accuracy_targets import name_of
from cfl.cli.checkpoints import SECTIONS
from cfl.data.schedule import Schedule
from cfl.data.sources import Synthetic
from cfl.reporting.experiment import config_hash, differences, experiment_of, with_defaults
from cfl.reporting.rounds_file import read_rounds
from cfl.runtime.errors import ConfigError
from cfl.testing.processes import Crew

ROUNDS = 16
ONE_TASK = (
    *("--data.stream.num_tasks", "1", "--schedule.rounds_per_task", str(ROUNDS)),
    *("--schedule.evaluate_every", "2", "--seed_everything", "1"),
)
TWO_TASKS = ("--schedule.rounds_per_task", "6", "--schedule.evaluate_every", "1")
PARALLEL = ("--trainer.strategy", "cfl.training.strategy.ClientParallel", "--trainer.devices", "2")


def naive(folder: Path, target: float) -> int | None:
    """Return the first round, counted from 1, in which rounds.csv reaches the target."""
    for done, row in enumerate(tiny_cli.rows(folder / "rounds.csv"), start=1):
        if row["acc"] != "" and float(row["acc"]) >= target:
            return done
    return None


def without_seconds(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in tiny_cli.rows(folder / "rounds.csv")]


def asked(*targets: float) -> tuple[str, str]:
    return "--targets.accuracies", str(list(targets))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one task without targets, which has all its rounds."""
    folder = tmp_path_factory.mktemp("targets") / "whole"
    assert tiny_cli.fit(folder, *ONE_TASK) == 0
    return folder


@pytest.fixture(scope="module")
def targets(whole: Path) -> tuple[float, float]:
    """Two accuracies that the run first reaches in different rounds, after its first evaluation and before its end."""
    records: list[tuple[int, float]] = []
    for r, acc in enumerate(read_rounds(whole / "rounds.csv")["acc"], start=1):
        if acc is not None and acc > max((best for _, best in records), default=0.0):
            records.append((r, acc))
    (first, low), (last, high) = records[1:3]
    assert 2 < first < last < ROUNDS
    return low, high - 0.5  # the first is reached exactly, the second is exceeded


@pytest.fixture(scope="module")
def stopped(whole: Path, targets: tuple[float, float], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with these accuracies as targets."""
    folder = tmp_path_factory.mktemp("targets") / "stopped"
    assert tiny_cli.fit(folder, *ONE_TASK, *asked(*targets), pictures=True) == 0
    return folder


# A run that stops.


def test_rounds_are_those_of_the_table_and_the_run_ends_with_the_last(
    whole: Path, stopped: Path, targets: tuple[float, float]
) -> None:
    low, high = (naive(whole, target) for target in targets)
    assert low is not None
    assert high is not None
    summary = tiny_cli.summary(stopped)
    assert summary["rounds_to_accuracy"] == {name_of(targets[0]): low, name_of(targets[1]): high}
    assert summary["rounds"] == high
    assert summary["stopped_early"] is True
    # The rows are those of the run without targets, up to the last target.
    assert without_seconds(stopped) == without_seconds(whole)[:high]
    assert summary["acc"] == float(tiny_cli.rows(whole / "rounds.csv")[high - 1]["acc"])


def test_a_stopped_run_is_a_finished_one(stopped: Path) -> None:
    assert {path.name for path in stopped.iterdir()} == {
        *(
            "config.yaml",
            "summary.json",
            "SHA256SUMS",
            "rounds.csv",
            "accuracy_matrix.csv",
            "last.ckpt",
            "partition.csv",
        ),
        *("partition.png", "accuracy_matrix.png", "accuracy_curve.png", "accuracy_rounds.png"),
    }
    state = tiny_cli.checkpoint(stopped)["federation"]
    assert state["round"] == tiny_cli.summary(stopped)["rounds"]
    assert state["stopped"] is True
    assert state["curve"] == read_rounds(stopped / "rounds.csv")["acc"]
    assert state["curve"][0] is None  # evaluated every second round


def test_resuming_a_stopped_run_does_nothing_and_says_so(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in stopped.iterdir() if path.suffix not in (".png", ".yaml")}
    done = tiny_cli.summary(stopped)["rounds"]
    capsys.readouterr()
    assert tiny_cli.run("fit", "--ckpt_path", str(stopped / "last.ckpt")) == 0
    said = capsys.readouterr().out
    assert f"nothing to do: the run stopped after {done} rounds" in said
    assert f"stopped after {done} of {ROUNDS} rounds: all targets are met" in said
    assert {name: (stopped / name).read_bytes() for name in before} == before


def test_the_end_of_a_fit_and_validate_say_the_rounds(
    stopped: Path, targets: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tiny_cli.run("validate", "--ckpt_path", str(stopped / "last.ckpt")) == 0
    said = capsys.readouterr().out
    assert "is not finished" not in said
    for target in targets:
        assert f"rounds to {name_of(target)} %: {naive(stopped, target)}\n" in said


@pytest.mark.parametrize(
    ("stage", "before_the_end", "number"),
    [("training", 2, signal.SIGTERM), ("closed", 0, signal.SIGKILL), ("written", 1, signal.SIGKILL)],
)
def test_interrupted_and_resumed_equals_uninterrupted(
    stage: str, before_the_end: int, number: int, stopped: Path, targets: tuple[float, float], tmp_path: Path
) -> None:
    """A run with targets that is killed and resumed equals an uninterrupted one.

    That holds in the round of the stop, too, if the summary is written and the checkpoint is not.
    """
    last = tiny_cli.summary(stopped)["rounds"] - 1
    folder, options = tmp_path / "run", (*ONE_TASK, *asked(*targets))
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *options)
    if number == signal.SIGTERM:
        with tiny_cli.die_at(stage, last - before_the_end, number):
            assert tiny_cli.run(*arguments) == 143
    else:
        assert tiny_cli.killed(stage, last - before_the_end, *arguments) == -number
    held = tiny_cli.checkpoint(folder)["federation"]
    assert held["round"] <= last
    assert held["stopped"] is False
    assert tiny_cli.run(*arguments, "--ckpt_path", "last") == 0
    tiny_cli.assert_same(tiny_cli.results(folder), tiny_cli.results(stopped))


def test_a_signal_in_the_round_of_the_stop_leaves_a_finished_run(
    stopped: Path, targets: tuple[float, float], tmp_path: Path
) -> None:
    with tiny_cli.die_at("training", tiny_cli.summary(stopped)["rounds"] - 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path / "run", *ONE_TASK, *asked(*targets)) == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "run"), tiny_cli.results(stopped))


@pytest.mark.parametrize("method", ["FOT", "EWC", "GPM", "RGO", "ER", "GradientCompensation"])
def test_methods_can_be_stopped_before_the_tasks_end(method: str, tmp_path: Path) -> None:
    """A method whose run stops within a task still writes its figures and tables."""
    options = (*ONE_TASK, "--schedule.evaluate_every", "1", *asked(1), f"--methods.m={method}")
    required = {"ER": ("--methods.m.size=4",), "EWC": ("--methods.m.strength=1.0",)}
    status = tiny_cli.fit(tmp_path, *options, *required.get(method, ()))
    assert status == 0
    assert tiny_cli.summary(tmp_path)["rounds_to_accuracy"] == {"1": 1}
    assert tiny_cli.summary(tmp_path)["rounds"] == 1


# Runs that do not stop.


def test_a_target_that_is_never_reached(whole: Path, targets: tuple[float, float], tmp_path: Path, capsys: Any) -> None:
    assert tiny_cli.fit(tmp_path, *ONE_TASK, *asked(99.5, targets[0])) == 0
    summary = tiny_cli.summary(tmp_path)
    assert summary["rounds_to_accuracy"] == {name_of(targets[0]): naive(whole, targets[0]), "99.5": None}
    assert list(summary["rounds_to_accuracy"]) == [name_of(targets[0]), "99.5"]
    assert (summary["rounds"], summary["stopped_early"]) == (ROUNDS, False)
    assert f"rounds to 99.5 %: not reached in {ROUNDS}\n" in capsys.readouterr().out


def test_a_target_met_in_the_last_round_is_no_early_stop(whole: Path, tmp_path: Path) -> None:
    shorter = naive(whole, max(acc for acc in read_rounds(whole / "rounds.csv")["acc"] if acc is not None))
    best = max(acc for acc in read_rounds(whole / "rounds.csv")["acc"] if acc is not None)
    options = (*ONE_TASK, "--schedule.rounds_per_task", str(shorter), *asked(best))
    assert tiny_cli.fit(tmp_path, *options) == 0
    summary = tiny_cli.summary(tmp_path)
    assert (summary["rounds_to_accuracy"], summary["stopped_early"]) == ({name_of(best): shorter}, False)
    assert tiny_cli.checkpoint(tmp_path)["federation"]["stopped"] is False


def test_several_tasks_are_counted_from_the_start_of_the_run_and_change_nothing(tmp_path: Path) -> None:
    """Targets that do not stop a run of several tasks add their rounds, counted from its start, and change nothing."""
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert tiny_cli.fit(plain, *TWO_TASKS) == 0
    curve = read_rounds(plain / "rounds.csv")["acc"]
    assert None not in curve
    best = max(acc for acc in curve if acc is not None)
    assert (naive(plain, best) or 12) < 12, "all are met, and rounds follow"
    assert tiny_cli.fit(watched, *TWO_TASKS, *asked(best, 1), "--targets.stop", "false") == 0
    ours, theirs = tiny_cli.results(watched), tiny_cli.results(plain)
    assert ours["summary"].pop("rounds_to_accuracy") == {"1": 1, name_of(best): naive(plain, best)}
    assert ours["summary"].pop("stopped_early") is False
    tiny_cli.assert_same(ours, theirs)


def test_personal_models_are_counted_by_the_mean_over_clients(tmp_path: Path) -> None:
    options = (*TWO_TASKS, "--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']")
    assert tiny_cli.fit(tmp_path, *options, *asked(30, 45.5, 60), "--targets.stop", "false") == 0
    found = tiny_cli.summary(tmp_path)["rounds_to_accuracy"]
    assert found == {name: naive(tmp_path, float(name)) for name in ("30", "45.5", "60")}
    assert any(rounds is not None for rounds in found.values())


# Several processes.


def in_crew(arguments: tuple[str, ...]) -> tuple[int, str]:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        status = tiny_cli.run(*arguments, *PARALLEL)
    return status, out.getvalue()


def test_all_processes_stop_in_the_same_round(
    crew: Crew, stopped: Path, targets: tuple[float, float], tmp_path: Path
) -> None:
    """All processes stop in the same round. Otherwise one would wait for the others for ever."""
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(tmp_path), *ONE_TASK, *asked(*targets))
    (status, said), (other, silent) = crew.run(in_crew, arguments)
    assert (status, other, silent) == (0, 0, ""), said + silent
    for key in ("rounds", "rounds_to_accuracy", "stopped_early", "acc", "config_hash"):
        assert tiny_cli.summary(tmp_path)[key] == tiny_cli.summary(stopped)[key], key
    assert tiny_cli.checkpoint(tmp_path)["federation"]["curve"] == read_rounds(stopped / "rounds.csv")["acc"]
    (status, said), (other, silent) = crew.run(in_crew, (*arguments, "--ckpt_path", "last"))
    assert (status, other, silent) == (0, 0, "")
    assert said.count("nothing to do") == 1


def states(size: int) -> dict[str, Any]:
    from cfl.testing.processes import several

    data = tiny.tiny_data(tiny.permuted(1), schedule={"rounds_per_task": 12, "evaluate_every": 1, "cohort_width": 2})
    watch = AccuracyTargets([40, 50])
    federation = tiny.fit(tiny.tiny_client(data), data, callbacks=[watch], **(several(size) if size > 1 else {}))
    return {"round": federation.round, "stopped": federation.stopped, "curve": federation.curve, "pid": os.getpid()}


def test_every_process_knows_the_curve(crew: Crew) -> None:
    alone, together = states(1), crew.run(states, 2)
    assert alone["stopped"] is True
    assert 1 < alone["round"] < 12
    assert len({state.pop("pid") for state in (alone, *together)}) == 3
    assert together == [alone, alone]


# The experiment.


def experiment(**of_targets: Any) -> dict[str, Any]:
    config = {"schedule": {"evaluate_every": 1}, "targets": {"accuracies": [], "stop": True, **of_targets}}
    return experiment_of({**config, "data": {}, "model": {}, "federated": {}, "methods": {}, "seed_everything": 0})


def test_targets_are_part_of_the_experiment_only_where_they_may_end_it() -> None:
    off = experiment()
    assert "targets" not in off
    assert experiment(stop=False) == experiment(accuracies=[85, 90], stop=False) == off
    on = experiment(accuracies=[85, 90])
    assert config_hash(on) != config_hash(off)
    assert config_hash(on) == config_hash(experiment(accuracies=[90.0, 85.0])), "written in another way"
    assert config_hash(on) != config_hash(experiment(accuracies=[85, 90.5]))
    assert any("targets" in line for line in differences(on, off))


def test_targets_that_lack_a_later_option_are_recognised() -> None:
    on = experiment(accuracies=[85])
    older = copy.deepcopy(on)
    del older["targets"]["stop"]  # as if the option had come later
    assert with_defaults(older, on, SECTIONS) == on
    assert with_defaults(experiment(), on, SECTIONS) != on, "a run to its last round is another one"


def test_a_checkpoint_is_not_resumed_with_other_targets(
    stopped: Path, targets: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for options in (asked(*targets, 99), ()):
        status = tiny_cli.fit(stopped, *ONE_TASK, *options, "--ckpt_path", "last")
        assert status == 2
        assert "they differ in targets" in capsys.readouterr().err


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (asked(0), "targets.accuracies = 0.0 cannot work; valid: a number in (0, 100]"),
        (asked(90, 100.5), "targets.accuracies = 100.5 cannot work"),
        (asked(-1), "targets.accuracies = -1.0 cannot work"),
        (("--targets.accuracies", "[.nan]"), "targets.accuracies = nan cannot work"),
        (asked(90, 85, 90), "targets.accuracies = [90.0, 85.0, 90.0] cannot work; valid: every accuracy once"),
        ((*asked(90), "--schedule.evaluate_every", "0"), "schedule.evaluate_every = 0 cannot work; valid: at least 1"),
        (
            (*asked(90), "--schedule.evaluate_every", "0", "--schedule.clock_spread", "0.5"),
            "schedule.clock_spread = 0.5 cannot work; valid: 0 with targets.accuracies",
        ),
        (
            (*asked(90), "--data.stream.num_tasks", "3"),
            "targets.stop = True cannot work; valid: false with 3 tasks",
        ),
        (("--trainer.min_epochs", "3"), "trainer.min_epochs = 3 cannot work; valid: 0: unset"),
        (("--trainer.min_steps", "3"), "trainer.min_steps = 3 cannot work; valid: 0: unset"),
    ],
)
def test_what_cannot_work_is_refused_before_training(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_cli.fit(tmp_path / "run", *ONE_TASK, *options) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "rounds.csv").exists()


def test_refused_before_data_are_read_or_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Synthetic, "load", lambda *_: pytest.fail("data are read"))
    assert tiny_cli.fit(tmp_path / "run", *ONE_TASK, *asked(90), "--schedule.evaluate_every", "0") == 2
    assert not (tmp_path / "run").exists()


def test_without_targets_and_evaluations_there_is_nothing_to_see(tmp_path: Path) -> None:
    assert tiny_cli.fit(tmp_path) == 0
    assert not (tmp_path / "accuracy_rounds.png").exists()
    assert not {"rounds_to_accuracy", "stopped_early"} & set(tiny_cli.summary(tmp_path))


def test_refused_also_without_the_command_line() -> None:
    data = tiny.tiny_data(tiny.permuted(1))
    with pytest.raises(ConfigError, match=r"schedule\.evaluate_every = 0"):
        tiny.fit(tiny.tiny_client(data), data, callbacks=[AccuracyTargets([90])])
    AccuracyTargets([90], stop=False).check(Schedule(evaluate_every=1), num_tasks=3)
    AccuracyTargets().check(Schedule(), num_tasks=3)


def test_names_of_targets() -> None:
    assert [name_of(a) for a in (85, 97.5, 99.999999, 100.0)] == ["85", "97.5", "99.999999", "100"]


# Loggers.


def test_loggers_hear_of_a_target_once_in_its_round(
    stopped: Path, targets: tuple[float, float], tmp_path: Path
) -> None:
    logger = ("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path))
    assert tiny_cli.fit(tmp_path, *ONE_TASK, *asked(*targets), *logger) == 0
    (path,) = tmp_path.rglob("metrics.csv")
    logged = tiny_cli.rows(path)
    for target in targets:
        name, rounds = f"cl/rounds_to_{name_of(target)}", naive(stopped, target)
        assert rounds is not None
        told = [(row["round"], float(row[name])) for row in logged if row.get(name)]
        assert [(float(r), value) for r, value in told] == [(rounds - 1, rounds)]


def test_progress_shows_the_round_of_the_stop(
    stopped: Path, targets: tuple[float, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert tiny_cli.fit(tmp_path, *ONE_TASK, *asked(*targets), "--progress.plain_seconds", "1000") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("task 0/0")]
    summary = tiny_cli.summary(stopped)
    assert f"round {summary['rounds'] - 1}/{ROUNDS - 1} " in line
    assert f"last ACC {summary['acc']:.2f}  left 0:00" in line


def test_the_record_asks_the_trainers_own_targets(tmp_path: Path) -> None:
    """RunRecord writes the rounds of the Trainer's own AccuracyTargets, without the command line."""
    data = tiny.tiny_data(tiny.permuted(1), schedule={"rounds_per_task": 12, "evaluate_every": 1})
    record = RunRecord(str(tmp_path / "run"))
    trainer = tiny.tiny_trainer(data)
    trainer.callbacks[:] = [FederatedOrchestrator(), AccuracyTargets([30]), record]  # type: ignore[attr-defined]
    trainer.fit(tiny.tiny_client(data), datamodule=data)
    assert tiny_cli.summary(tmp_path / "run")["rounds_to_accuracy"] == {"30": naive(tmp_path / "run", 30)}
