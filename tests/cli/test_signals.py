"""A signal ends a command with one line, the exit status that shells expect, and a run folder that can be used."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import tiny_cli

import cfl.training.client
from cfl.callbacks import RunRecord
from cfl.cli.federated_cli import FederatedCLI
from cfl.data.datamodule import FederatedDataModule
from cfl.runtime import signals
from cfl.training.client import Client
from cfl.training.evaluation import Scoring

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@contextmanager
def sending(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int,
    due: Callable[..., bool] = lambda *_, **__: True,
    times: int = 1,
) -> Iterator[None]:
    """Within the context, this process sends itself a signal at every call of a function for which ``due`` is true."""
    original = getattr(owner, name)

    def method(*arguments: Any, **named: Any) -> Any:
        for _ in range(times if due(*arguments, **named) else 0):
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, method)
        yield


def program(*arguments: str) -> int:
    """Run ``cfl ...`` as a program. All modules are imported here, so that signals let it clean up from its start."""

    def main() -> int:
        signals.hold()
        return tiny_cli.run(*arguments)

    return signals.ended_by_signals(main)


def fit(folder: Path, *options: str) -> int:
    return program("fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *options)


MOMENTS: dict[str, tuple[Any, str]] = {
    "parsing": (FederatedCLI, "before_instantiate_classes"),
    "building the trainer": (FederatedCLI, "instantiate_trainer"),
    "taking the folder": (RunRecord, "prepare"),
    "reading data": (FederatedDataModule, "setup"),
    "loading the model": (FederatedDataModule, "prepare_data"),
    "beginning the record": (RunRecord, "begin"),
    "choosing an engine": (cfl.training.client, "choose_engine"),
}
"""Moment before training -> the function that is called then."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_while_starting(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal before training ends the command, and the same command can be run again without further options."""
    number = list(STATUS)[len(moment) % 3]
    handlers = {each: signal.getsignal(each) for each in STATUS}
    with sending(monkeypatch, *MOMENTS[moment], number):
        assert fit(tmp_path / "run") == STATUS[number]
    said = capsys.readouterr().err
    assert said == f"stopped by {number.name}\n"
    assert {each: signal.getsignal(each) for each in STATUS} == handlers
    assert tiny_cli.fit(tmp_path / "run") == 0


def untrained(scoring: Scoring, untrained: bool, **_: Any) -> bool:
    return untrained


def trained(scoring: Scoring, untrained: bool, **_: Any) -> bool:
    return not untrained


@pytest.mark.parametrize(("due", "rounds"), [(untrained, 1), (trained, 3)])
def test_an_evaluation_waits_for_the_end_of_the_round(
    due: Callable[..., bool], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in an evaluation ends the run after its round. In the one before training, it ends after round 0."""
    with sending(monkeypatch, Scoring, "begin", signal.SIGHUP, due):
        assert fit(tmp_path) == 129
    assert tiny_cli.checkpoint(tmp_path)["federation"]["round"] == rounds


def is_summary(tree: Any, **_: Any) -> bool:
    return isinstance(tree, dict) and "finished_at" in tree


def test_in_the_middle_of_the_final_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal while summary.json is written leaves no summary, and the resumed run ends as a whole run."""
    with sending(monkeypatch, json, "dumps", signal.SIGTERM, is_summary):
        assert fit(tmp_path / "my run") == 143
    said = f"stopped by SIGTERM; continue with: cfl fit --ckpt_path '{tmp_path}/my run/last.ckpt'\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "my run" / "summary.json").exists()
    assert fit(tmp_path / "my run", "--ckpt_path", "last") == 0
    assert fit(tmp_path / "whole") == 0
    tiny_cli.assert_same(*(tiny_cli.results(tmp_path / name) for name in ("my run", "whole")))


@pytest.mark.parametrize("command", ["validate", "test"])
def test_scoring_ends_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path) == 0
    capsys.readouterr()
    with sending(monkeypatch, Scoring, "score", signal.SIGTERM):
        assert program(command, "--ckpt_path", str(tmp_path / "last.ckpt")) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_what_is_ignored_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is ignored, as SIGHUP under nohup, does not stop a run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sending(monkeypatch, Client, "training_step", signal.SIGHUP):
            assert fit(tmp_path) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_written_to_a_terminal_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr(signals._Program, "terminals", (theirs,))
    os.close(ours)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"lost")
    signals.leave_terminal(signal.SIGTERM)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(theirs, b"lost")
    signals.leave_terminal(signal.SIGHUP)
    assert os.write(theirs, b"lost") == 4
    os.close(theirs)


# Processes that end at once.


def _twice(number: int, folder: Path) -> None:
    """Run a fit that gets two signals in one local step."""
    with pytest.MonkeyPatch.context() as patch, sending(patch, Client, "training_step", number, in_round_1, times=2):
        raise SystemExit(fit(folder, "--progress.enabled", "false"))


def in_round_1(client: Client, *_: Any) -> bool:
    return client.require_federation().round == 1


def _unheld(number: int, folder: Path) -> None:
    """Send a signal while there is nothing to clean up."""
    raise SystemExit(signals.ended_by_signals(lambda: os.kill(os.getpid(), number) or 0))


def ended(target: Callable[[int, Path], None], number: int, folder: Path) -> int | None:
    """Return the exit code of ``target`` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cfl.cli.main"])
    process = context.Process(target=target, args=(number, folder))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ends_the_process_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """A second signal ends the process at once. Its last checkpoint remains, and the run can be resumed from it."""
    assert ended(_twice, number, tmp_path) == -number
    assert tiny_cli.checkpoint(tmp_path)["federation"]["round"] == 1
    assert fit(tmp_path, "--ckpt_path", "last") == 0


@pytest.mark.parametrize("number", STATUS)
def test_before_there_is_anything_to_put_away(number: signal.Signals, tmp_path: Path) -> None:
    assert ended(_unheld, number, tmp_path) == STATUS[number]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``python -m cfl fit`` and wait until it handles SIGTERM, which is while it imports."""
    command = [sys.executable, "-m", "cfl", "fit", "--config", str(tiny_cli.TINY), "--run.dir", str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    handled = 1 << signal.SIGTERM - 1
    while not caught(process.pid) & handled:
        time.sleep(0.002)
    return process


def caught(pid: int) -> int:
    """The signals for which a process has handlers, as bits."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for handlers")
@pytest.mark.parametrize("number", STATUS)
@pytest.mark.parametrize("seconds", [0.0, 0.7, 1.5, 3.0, 6.0])
def test_the_program_while_it_imports_and_begins(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """A signal 0 to 6 seconds after the start ends the program with the status of that signal and one line."""
    process = start(tmp_path / "run", "--schedule.rounds_per_task", "100000", "--progress.enabled", "false")
    time.sleep(seconds)
    process.send_signal(number)
    _, said = process.communicate(timeout=180)
    assert process.returncode == STATUS[number], said
    assert said.replace("; continue with: cfl fit --ckpt_path " + str(tmp_path / "run" / "last.ckpt"), "") in (
        f"stopped by {number.name}\n",
        "\nstopping after this round; the same signal again stops at once\n",
    )
    if not (tmp_path / "run" / "last.ckpt").exists():
        assert tiny_cli.fit(tmp_path / "run") == 0
