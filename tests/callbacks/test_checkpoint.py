"""Checkpoints: a run that is killed, stopped or moved, and then resumed, equals an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from support import tiny, tiny_cli
from support.tiny_cli import VARIANTS

import cfl.callbacks.checkpoint
from cfl.callbacks import FederatedOrchestrator, RoundCheckpoint, RunRecord
from cfl.callbacks.checkpoint import _Write
from cfl.data.sources import Synthetic
from cfl.data.streams import Permuted
from cfl.models import MLP
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.runtime.checkpoint_file import write_checkpoint


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_any_moment_and_resumed_equals_uninterrupted(tmp_path: Path, variant: str) -> None:
    """A run killed in local steps, and before, while and after a file is written, equals an uninterrupted one."""
    moments = [("closed", 0), ("training", 1), ("writing", 3), ("written", 4)]
    options, folder = VARIANTS[variant], tmp_path / "killed"
    arguments = ("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *options, "--ckpt_path", "last")
    for stage, round in moments if variant == "fedavg" else moments[1::2]:
        assert tiny_cli.killed(stage, round, *arguments) == -signal.SIGKILL, stage
        assert len(list(folder.glob(".cfl-*"))) == (stage == "writing")
    assert not (folder / "summary.json").exists()
    assert tiny_cli.run(*arguments) == 0
    assert not list(folder.glob(".cfl-*"))
    assert tiny_cli.fit(tmp_path / "whole", *options) == 0
    tiny_cli.assert_same(tiny_cli.results(folder), tiny_cli.results(tmp_path / "whole"))


def test_killed_from_outside_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """A run that `kill -9` ends at any moment equals an uninterrupted one once it is resumed with --ckpt_path last."""
    folder, options = tmp_path / "run", ("--schedule.rounds_per_task", "60", "--checkpoint.share", "0.3")
    rounds, after = folder / "rounds.csv", random.Random(0).randrange(1, 50)
    process = tiny_cli.start("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *options)
    while process.is_alive() and not (rounds.exists() and rounds.read_text().count("\n") > after):
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert tiny_cli.fit(folder, *options, "--ckpt_path", "last") == 0
    assert tiny_cli.fit(tmp_path / "whole", *options) == 0
    tiny_cli.assert_same(tiny_cli.results(folder), tiny_cli.results(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_the_run_after_its_round(
    tmp_path: Path, number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal ends a run after its current round, with that round's checkpoint and the signal's status.

    The resumed run equals an uninterrupted one.
    """
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    options = VARIANTS["fot"]
    with tiny_cli.die_at("training", 1, number):
        assert tiny_cli.fit(tmp_path / "run", *options) == status
    assert f"--ckpt_path {tmp_path / 'run'}/last.ckpt" in capsys.readouterr().out
    assert {n: signal.getsignal(n) for n in handlers} == handlers
    assert tiny_cli.checkpoint(tmp_path / "run")["federation"]["round"] == 2
    assert [row["round"] for row in tiny_cli.rows(tmp_path / "run" / "rounds.csv")] == ["0", "1"]
    assert not (tmp_path / "run" / "summary.json").exists()
    assert tiny_cli.run("fit", "--ckpt_path", str(tmp_path / "run" / "last.ckpt")) == 0
    assert tiny_cli.fit(tmp_path / "whole", *options) == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "run"), tiny_cli.results(tmp_path / "whole"))


def test_an_interrupted_run_without_checkpoints_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path, "--checkpoint.enabled", "false") == 143
    assert capsys.readouterr().out.splitlines()[-1] == "interrupted; checkpoint.enabled is false"
    assert not (tmp_path / "last.ckpt").exists()


def test_signal_in_the_last_round_leaves_a_finished_run(tmp_path: Path) -> None:
    """A run that gets a signal in its last round finishes with status 0."""
    with tiny_cli.die_at("training", 5, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path) == 0
    assert tiny_cli.summary(tmp_path)["rounds"] == 6


def test_signals_are_given_back_after_an_error(tmp_path: Path) -> None:
    """The former signal handlers are restored after an error, so that Ctrl-C works after a failed run in a notebook."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    assert tiny_cli.fit(tmp_path, "--model.optimizer.lr", "1e30") == 2
    assert {n: signal.getsignal(n) for n in handlers} == handlers


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_cli.fit(tmp_path, *VARIANTS["fot"]) == 0
    before, first = tiny_cli.results(tmp_path), capsys.readouterr().out
    assert tiny_cli.fit(tmp_path, *VARIANTS["fot"], "--ckpt_path", "last") == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path), before)
    said = capsys.readouterr().out
    assert said[-500:] == first[-500:]  # the figures are shown again
    assert f"{tmp_path / 'last.ckpt'} is of a finished run: nothing is left to train" in said
    assert "nothing is left" not in first


def test_run_folder_may_be_moved_before_resuming(tmp_path: Path) -> None:
    """A run resumed from a moved folder writes into the folder of the checkpoint, not into the former one."""
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        assert tiny_cli.fit(tmp_path / "old") == 143
    (tmp_path / "old").rename(tmp_path / "new")
    assert tiny_cli.run("fit", "--ckpt_path", str(tmp_path / "new" / "last.ckpt")) == 0
    assert not (tmp_path / "old").exists()
    assert tiny_cli.fit(tmp_path / "whole") == 0
    tiny_cli.assert_same(tiny_cli.results(tmp_path / "new"), tiny_cli.results(tmp_path / "whole"))


def test_checkpoint_holds_the_global_model_as_a_plain_state_dict(tmp_path: Path) -> None:
    """The checkpoint read by plain torch has the weights of the network that was scored."""
    assert tiny_cli.fit(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".tmp", ".ckpt")] == ["last.ckpt"]
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("network.") for name in state)
    network = MLP((1, 4, 4), 4, hidden=[8], dropout=0.0)
    network.load_state_dict({name.removeprefix("network."): value for name, value in state.items()})
    stream = Permuted(Synthetic(4, [1, 4, 4], 96, 40, noise=60.0), num_tasks=2)
    measured = []
    for task in stream.tasks(tmp_path, seed=0):
        predicted = network(task.transform(task.test.images)).argmax(1)
        measured.append(100 * sum(int(p == y) for p, y in zip(predicted, task.test.labels, strict=True)) / 40)
    assert measured == read_matrix_csv(tmp_path / "accuracy_matrix.csv")[0][1].tolist()
    assert len(set(measured)) == 2  # the tasks' accuracies differ, so that a transposed matrix would be noticed


def test_file_keeps_the_old_checkpoint_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """If writing a checkpoint fails half-way, the former file is still there."""
    record, federation = RunRecord(str(tmp_path)), SimpleNamespace()
    (tmp_path / "last.ckpt").write_text("whole")

    def fails(path: Path) -> None:
        path.write_text("ha")
        raise OSError("disk full")

    trainer: Any = SimpleNamespace(save_checkpoint=fails, callbacks=[record], federation=federation)
    with pytest.raises(OSError, match="disk full"):
        RoundCheckpoint()._save(trainer, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").read_text() == "whole"


def writes(folder: Path, share: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, float, float]], float]:
    """Return (round, time, seconds) of every checkpoint of a run, and the run's time in all.

    Times are of a simulated clock: a round takes 1 s, a file takes 0.25 s and later 1 s.
    """
    now = [1000.0]
    written: list[tuple[int, float, float]] = []
    save, end = Trainer.save_checkpoint, FederatedOrchestrator.on_train_epoch_end

    def slow_save(trainer: Trainer, path: Path) -> None:
        federation = trainer.lightning_module.federation
        seconds = 0.25 if federation.round < 60 else 1.0
        written.append((federation.round, now[0], seconds))
        now[0] += seconds
        save(trainer, path)

    def slow_round(*arguments: Any) -> None:
        now[0] += 1.0
        end(*arguments)

    monkeypatch.setattr(cfl.callbacks.checkpoint, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Trainer, "save_checkpoint", slow_save)
    monkeypatch.setattr(FederatedOrchestrator, "on_train_epoch_end", slow_round)
    data = tiny.tiny_data(
        tiny.permuted(tasks=5, train=4, test=4),
        num_clients=1,
        schedule={"rounds_per_task": 30},
    )
    tiny.fit(
        tiny.tiny_client(data),
        data,
        callbacks=[RunRecord(str(folder)), RoundCheckpoint(share)],
        enable_checkpointing=True,
    )
    return written, now[0] - 1000.0


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_time_spent_on_writing_keeps_under_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Writing checkpoints takes at most the share of a run's time, and they are not written more rarely than needed."""
    written, seconds = writes(tmp_path, share, monkeypatch)
    assert (written[0][0], written[-1][0]) == (1, 150)
    assert sum(taken for *_, taken in written) <= share * seconds
    # The pause after a file is its own time / share, up to the next round's end. It is longer once files take longer,
    # because time for the last file is reserved, too.
    for (_, _, before), (_, at, taken), (_, following, _) in zip(written, written[1:], written[2:-1], strict=False):
        assert following - at <= (taken + 2 * (taken - before)) / share + 1.0 + taken
    assert len(written) > 7


def test_files_that_grow_leave_time_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If files grow with every round, writing still stays below the share, and uses more than 80 % of it.

    A file takes a second per MB.
    """
    now, rounds, share = [0.0], 1000, 0.02
    checkpoint, written = RoundCheckpoint(share), []
    monkeypatch.setattr(cfl.callbacks.checkpoint, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    network = torch.nn.Linear(500, 500, bias=False)
    for round in range(1, rounds + 1):
        federation: Any = SimpleNamespace(
            clients=SimpleNamespace(bytes=lambda round=round: 1000 * round),
            network=network,
            round=round,
            schedule=SimpleNamespace(num_rounds=rounds),
        )
        now[0] += 1.0
        if checkpoint._due(federation) or round == rounds:
            seconds = (1e6 + 1000 * round) / 1e6
            checkpoint._writes.append(_Write(round, 1_000_000 + 1000 * round, seconds))
            now[0] += seconds
            written.append(seconds)
    assert sum(written) <= share * now[0]
    assert sum(written) > 0.8 * share * now[0]


def test_ends_of_tasks_are_written_only_where_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, _ = writes(tmp_path, 1e-6, monkeypatch)
    assert [round for round, *_ in written] == [1, 150]


# Files that cannot be resumed from.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert tiny_cli.fit(folder) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], path: Path, folder: Path, *options: str) -> str:
    """Return the line on standard error that refuses ``path``."""
    capsys.readouterr()
    assert tiny_cli.fit(folder, "--ckpt_path", str(path), *options) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"error: ckpt_path = '{path}' cannot work; valid: ")
    assert not (folder / "rounds.csv").exists()
    return message


def test_checkpoint_of_another_experiment_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names every key that differs with both values. It names no key that does not decide results."""
    options = ("--schedule.batch_size", "7", "--federated.server_lr", "0.5", "--schedule.cohort_width", "1")
    message = refused(capsys, finished / "last.ckpt", tmp_path / "run", *options)
    assert "schedule.batch_size: 7, in the checkpoint 8" in message
    assert "federated.server_lr: 0.5, in the checkpoint 1.0" in message
    differing, _, may_change = message.partition("; what may change is ")
    assert "cohort_width" not in differing
    assert "run.dir" not in differing
    assert "schedule.cohort_width" in may_change


def test_checkpoint_without_a_method_of_the_experiment_is_refused(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, finished / "last.ckpt", tmp_path / "run", "--methods.fot", "FOT")
    assert "methods.fot" in message


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_checkpoint_is_refused(
    finished: Path, tmp_path: Path, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.ckpt"
    whole = (finished / "last.ckpt").read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "a whole checkpoint" in refused(capsys, path, tmp_path / "run")


@pytest.mark.parametrize("content", [{"state_dict": {}}, torch.zeros(3), [1, 2]])
def test_other_torch_files_are_refused(tmp_path: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content, tmp_path / "other.ckpt")
    assert "written by cfl fit" in refused(capsys, tmp_path / "other.ckpt", tmp_path / "run")


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.parametrize("held", [None, 1, 99])
def test_a_checkpoint_in_another_format_is_refused(
    tmp_path: Path, held: int | None, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_cli.die_at("training", 1, signal.SIGTERM):
        tiny_cli.fit(tmp_path)
    path = tmp_path / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["federation"]["format"]
    if held is not None:
        checkpoint["federation"]["format"] = held
    write_checkpoint(checkpoint, path)
    before = path.read_bytes()
    capsys.readouterr()
    assert tiny_cli.run(command, "--ckpt_path", str(path)) == 2
    assert f"ckpt_path = 'a checkpoint of format {held or 1}' cannot work; valid: 2" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_missing_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "an existing checkpoint file" in refused(capsys, tmp_path / "none.ckpt", tmp_path / "run")


def test_checkpoint_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign checkpoint whose objects would run code is refused, and the code does not run."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trap"),)

    torch.save({"federation": Trap(), "experiment": {}}, tmp_path / "trap.ckpt")
    said = refused(capsys, tmp_path / "trap.ckpt", tmp_path / "run")
    assert "other objects could run code, and are not read" in said
    assert "weights_only" not in said  # torch advises to set it to False
    assert not (tmp_path / "trap").exists()


def test_a_checkpoint_that_is_cut_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"federation": {}, "a": torch.zeros(1000)}, tmp_path / "whole.ckpt")
    whole = (tmp_path / "whole.ckpt").read_bytes()
    for size in (2000, len(whole) // 3, len(whole) - 1000):
        (tmp_path / "cut.ckpt").write_bytes(whole[:size])
        assert "(it is damaged, or cut off)" in refused(capsys, tmp_path / "cut.ckpt", tmp_path / "run"), size


def test_a_checkpoint_older_than_an_option_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint from before an option existed is resumed with the option's default, not with another value."""
    assert tiny_cli.fit(tmp_path / "run") == 0
    path = tmp_path / "run" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for section, option in (("data", "exposure"), ("schedule", "drop_last"), ("federated", "server_momentum")):
        del checkpoint["experiment"][section][option]
    write_checkpoint(checkpoint, path)
    assert tiny_cli.fit(tmp_path / "run", "--ckpt_path", "last") == 0
    assert tiny_cli.fit(tmp_path / "run", "--ckpt_path", "last", "--data.exposure", "joint") == 2
    assert "data.exposure: 'joint', in the checkpoint 'sequential'" in capsys.readouterr().err
