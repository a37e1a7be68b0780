"""When one process fails, all processes end soon, and the first one reports the cause."""

from __future__ import annotations

import io
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from support.tiny import Poison, fit, permuted, tiny_client, tiny_data

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.methods import Method
from cfl.runtime import heartbeat
from cfl.runtime.distributed import rank
from cfl.runtime.errors import ConfigError
from cfl.testing.processes import TIMEOUT, Crew, Failed
from cfl.training.strategy import ClientParallel, check_strategy

SOON = 45.0
"""Seconds in which processes must end, even on a busy machine. It is below the 60 s that they wait for a silent one."""


class Trouble(Method):
    """Calls ``happens`` in process 1, in the named hook of round 1."""

    def __init__(self, hook: str, happens: Callable[[], Any]) -> None:
        self.hook, self.happens = hook, happens

    def _at(self, hook: str, round: int) -> None:
        if hook == self.hook and round == 1 and rank() == 1:
            self.happens()

    def adjust_gradients(self, cohort: Cohort) -> None:
        self._at("adjust_gradients", cohort.round)

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self._at("finish_clients", cohort.round)

    def end_round(self, plan: RoundPlan) -> None:
        self._at("end_round", plan.round)


class Slow(Method):
    """In round 1, process 1 fails in its first step, and process 0 adds a letter to a file in every step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def adjust_gradients(self, cohort: Cohort) -> None:
        if cohort.round == 1:
            if rank() == 1:
                raise ArithmeticError("while the others compute")
            time.sleep(0.2)
            with self.file.open("a") as file:
                file.write("x")


class Full(Callback):
    """The first process fails in a hook in which it alone does something."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            raise OSError("disk full")


def wrong() -> None:
    raise ArithmeticError("made up")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(100)


def run(method: Method | None, callback: Callback | None, timeout: float) -> None:
    data = tiny_data(permuted(train=800), schedule={"cohort_width": 1})
    client = tiny_client(data, methods={"trouble": method} if method else {})
    strategy = ClientParallel(timeout_seconds=timeout)
    fit(client, data, callbacks=[callback] if callback else [], strategy=strategy, devices=2)


def outcomes(
    method: Method | None, callback: Callback | None = None, timeout: float = TIMEOUT
) -> tuple[Failed, Failed, float]:
    """The failures of processes 0 and 1, and the seconds until both have ended."""
    crew = Crew(2)
    started = time.monotonic()
    crew.start(run, method, callback, timeout)
    # Outside of tests a failed process ends. Here the crew keeps it alive, so it is killed.
    second = crew.outcome(1)
    crew.processes[1].kill()
    first = crew.outcome(0)
    seconds = time.monotonic() - started
    crew.close()
    assert isinstance(first, Failed)
    assert isinstance(second, Failed)
    return first, second, seconds


def test_a_bad_update_in_one_process_ends_both() -> None:
    data = tiny_data(permuted(train=800))
    ours = data.rounds.round(1).clients[1]  # equal clients are dealt in turn
    first, second, seconds = outcomes(Poison(ours, 1))
    assert second.kind == "BadUpdate"
    assert f"client {ours} trained to NaN or infinity in round 1 (task 0)" in second.message
    assert (first.kind, first.message) == ("ProcessFailed", f"process 1: {second.message}")
    assert seconds < SOON


@pytest.mark.parametrize("hook", ["adjust_gradients", "finish_clients", "end_round"])
def test_an_error_in_one_process_ends_both(hook: str) -> None:
    first, second, seconds = outcomes(Trouble(hook, wrong))
    assert "ArithmeticError: made up" in second.message
    assert (first.kind, first.message) == ("ProcessFailed", f"process 1: RuntimeError: {second.message}")
    assert seconds < SOON


def test_a_process_that_computes_hears_of_it_before_the_round_is_over(tmp_path: Path) -> None:
    """A computing process learns of a failure before its round ends, which has two clients of 25 steps each."""
    file = tmp_path / "steps"
    first, _, _ = outcomes(Slow(file))
    assert first.kind == "ProcessFailed"
    assert "while the others compute" in first.message
    assert 0 < len(file.read_text()) < 2 * 25


def test_an_error_of_the_first_process_ends_the_other() -> None:
    crew = Crew(2)
    crew.start(run, None, Full(), TIMEOUT)
    first = crew.outcome(0)
    crew.processes[0].kill()
    second = crew.outcome(1)
    crew.close()
    assert (first.kind, first.message) == ("OSError", "disk full")
    assert second.kind == "ProcessFailed"


def test_a_process_that_dies_ends_the_other() -> None:
    first, second, seconds = outcomes(Trouble("finish_clients", die))
    assert second.kind == "died"
    assert first.kind == "ProcessFailed"
    assert "ended without a word" in first.message
    assert seconds < SOON


def test_a_process_that_hangs_is_given_up() -> None:
    crew = Crew(2)
    started = time.monotonic()
    crew.start(run, Trouble("finish_clients", sleep), None, 3.0)
    first = crew.outcome(0)
    seconds = time.monotonic() - started
    crew.close()
    assert first.kind == "ProcessFailed"
    assert "did not answer" in first.message
    assert 3.0 <= seconds < SOON + 3.0


# Processes that are stopped but alive.


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)  # so that the others notice that it runs again


class Stops(Trouble):
    """Stops the given process at the end of round 1."""

    def __init__(self, process: int) -> None:
        super().__init__("end_round", stop_oneself)
        self.process = process

    def end_round(self, plan: RoundPlan) -> None:
        if plan.round == 1 and rank() == self.process:
            stop_oneself()


def told(method: Method, timeout: float) -> str:
    """Run with short heartbeat times. Returns the lines about processes on standard error."""
    heartbeat.BEAT, heartbeat.SILENT = 0.05, 0.5
    with redirect_stderr(io.StringIO()) as said:
        run(method, None, timeout)
    return "".join(line for line in said.getvalue().splitlines(True) if line.startswith("process "))


@pytest.mark.parametrize("process", [0, 1])
def test_a_stopped_process_is_named_and_waited_for(process: int) -> None:
    """A stopped process is named and waited for, also process 0, through which the others communicate."""
    crew = Crew(2)
    crew.start(told, Stops(process), TIMEOUT)
    wait_until_stopped(crew.processes[process].pid)
    time.sleep(1.0)
    os.kill(crew.processes[process].pid or 0, signal.SIGCONT)
    said = crew.outcomes()
    pid = crew.processes[process].pid
    crew.close()
    name = f"process {process} (on {platform.node()}, pid {pid})"
    lines = said[1 - process].splitlines()
    assert len(lines) == 2
    wait = "has given no sign of life for 0.5 s: it is stopped or out of reach; the others wait for it up to 60 s"
    assert lines[0] == f"{name} {wait} (trainer.strategy.timeout_seconds)"
    assert lines[1] == f"{name} is back"
    assert said[process] == ""


def test_a_stopped_process_that_stays_so_is_given_up_by_name() -> None:
    crew = Crew(2)
    crew.start(told, Stops(1), 3.0)
    first, pid = crew.outcome(0), crew.processes[1].pid
    crew.close()
    assert first.kind == "ProcessFailed"
    name = f"process 1 (on {platform.node()}, pid {pid})"
    assert first.message == f"{name} did not answer within trainer.strategy.timeout_seconds: stopped or out of reach"


def wait_until_stopped(pid: int | None) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, 1e15])
def test_times_that_torch_cannot_wait_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.strategy\.timeout_seconds = .* a number in \(0, 1e9\]"):
        check_strategy(Trainer(accelerator="cpu", devices=2, strategy=ClientParallel(seconds), logger=False))
