"""Runs experiments as processes, several at a time. Interrupted runs are resumed; a failed run does not end others."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cfl.reporting.csv_file import RunFolderError
from cfl.running.finished import diverged_experiment, read_finished
from cfl.running.jobs import Job
from cfl.running.launcher import Launched, environment_for
from cfl.running.missing_data import MissingData, find_missing, needs_of
from cfl.running.resolving import num_rounds
from cfl.running.run_log import LOG, last_lines
from cfl.runtime import file_lock, signals
from cfl.runtime.errors import ConfigError
from cfl.runtime.regular_file import open_regular
from cfl.runtime.run_files import CHECKPOINT, ROUNDS, SUMMARY

LOCK = ".lock"
VISIBLE = "CUDA_VISIBLE_DEVICES"

State = Literal["finished", "failed", "cannot run here", "interrupted", "runs elsewhere"]


@dataclass
class Outcome:
    """The outcome of a job.

    Attributes:
        job: the job.
        state: how the job ended.
        reason: reason for this state, for the user.
        diverged: whether the run failed because of NaN or infinity, so that it would fail again with its settings.
    """

    job: Job
    state: State
    reason: str = ""
    diverged: bool = False


Start = Callable[[Sequence[str], Mapping[str, str], int, int], Launched]
"""Function that starts a command, see :meth:`cfl.running.launcher.Launcher.start`."""


@dataclass
class _Running:
    job: Job
    process: Launched
    bar: TaskID
    device: str | None = None
    started: float = field(default_factory=time.monotonic)


def cuda_devices() -> list[str]:
    """The names by which this process may use CUDA devices, as ``CUDA_VISIBLE_DEVICES`` has them."""
    count = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return (given or [str(number) for number in range(count)])[:count]


class Runner:
    """Runs jobs, ``jobs`` of them at a time.

    Every run is a process ``cfl fit``. Its number of math threads is the number of cores divided by ``jobs``, unless
    ``OMP_NUM_THREADS`` is set. If there are several CUDA devices, every run gets the one with the fewest runs, because
    otherwise all would use the first device. A run's output goes to ``log.txt`` in its folder. The process inherits a
    file lock, so that two runners never use one folder. The lock ends with the process, however it dies.

    SIGINT, SIGTERM and SIGHUP are passed on as SIGTERM: runs write their checkpoint after the round and end, and no
    further run is started. A second signal ends the runs at once.

    Args:
        jobs: number of runs at a time.
        missing: remembers missing data sets for later commands, if given. A job is not started if it needs one that
            this runner has found missing.
        start: starts a process.
        console: shows progress: live bars on a terminal, otherwise a line per start and end.
        read: reads a finished run's folder; raises a :class:`RunFolderError` if the folder is damaged.

    Raises:
        ConfigError: ``jobs`` is below 1.
    """

    def __init__(
        self,
        jobs: int,
        missing: MissingData | None,
        start: Start,
        console: Console | None = None,
        read: Callable[[Path], object] = read_finished,
    ) -> None:
        self.environment = environment_for(jobs)
        self.jobs = jobs
        self.missing = missing
        self._read, self._start_process = read, start
        self.console = console or Console()
        self.interrupted_by: int | None = None
        self._running: list[_Running] = []
        self._devices = cuda_devices() if jobs > 1 else []
        self._absent: set[str] = set()  # found missing by this runner; what earlier ones found may be there by now

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run all jobs, started in this order, and return their outcomes in the order in which they ended."""
        outcomes: list[Outcome] = []
        waiting = list(jobs)
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        with self._signals(), progress:
            everything = progress.add_task("runs", total=len(waiting))
            while waiting or self._running:
                while waiting and len(self._running) < self.jobs:
                    job = waiting.pop(0)
                    if outcome := self._safely(job, "not started", partial(self._start, job, progress)):
                        outcomes.append(outcome)
                        self._say(progress, outcome, 0)
                for entry in [entry for entry in self._running if entry.process.poll() is not None]:
                    self._running.remove(entry)
                    progress.remove_task(entry.bar)
                    if outcome := self._safely(entry.job, "its end could not be seen to", partial(self._ended, entry)):
                        outcomes.append(outcome)
                        self._say(progress, outcome, time.monotonic() - entry.started)
                for entry in self._running:
                    progress.update(entry.bar, completed=rounds_done(entry.job.folder))
                progress.update(everything, completed=len(outcomes))
                if self._running:
                    time.sleep(0.05)
        return outcomes

    def _safely(self, job: Job, said: str, step: Callable[[], Outcome | None]) -> Outcome | None:
        """Return ``step()``, or a failed outcome after an error in the job's folder, so that other jobs continue."""
        try:
            return step()
        except (OSError, ConfigError) as error:
            return Outcome(job, "failed", f"{said}: {error}")

    def _start(self, job: Job, progress: Progress) -> Outcome | None:
        """Start a job's process. Returns an outcome if it is not started, and otherwise None."""
        if self.interrupted_by is not None:
            return Outcome(job, "interrupted", "not started")
        absent = [name for name in needs_of(job.experiment) if name in self._absent]
        if absent:
            return Outcome(job, "cannot run here", f"needs {', '.join(absent)}")
        job.folder.mkdir(parents=True, exist_ok=True)
        with (
            os.fdopen(open_regular(job.folder / LOCK, os.O_WRONLY), "wb") as lock,
            os.fdopen(open_regular(job.folder / LOG, os.O_WRONLY | os.O_APPEND), "ab") as log,
        ):
            if file_lock.lock(lock.fileno()) is False:
                return Outcome(job, "runs elsewhere", f"another process is at work in {job.folder}")
            if (job.folder / SUMMARY).exists() and self._damage(job.folder) is None:  # another process was quicker
                return Outcome(job, "finished", "by another process")
            device = self._device()
            environment = {**self.environment, **({VISIBLE: device} if device else {})}
            process = self._start_process(job.words, environment, log.fileno(), lock.fileno())
        continued = " (continued)" if (job.folder / CHECKPOINT).exists() else ""
        bar = progress.add_task(job.name + continued, total=num_rounds(job.config))
        self._running.append(_Running(job, process, bar, device))
        if self.interrupted_by is not None:  # while it was being started
            process.terminate()
        if not self.console.is_terminal:
            self.console.print(f"started  {job.name}{continued}", highlight=False, markup=False, soft_wrap=True)
        return None

    def _device(self) -> str | None:
        """The CUDA device for the next run; None where there is nothing to choose from."""
        if len(self._devices) < 2:
            return None
        return min(self._devices, key=[entry.device for entry in self._running].count)

    def _damage(self, folder: Path) -> str | None:
        """What is wrong with a finished run's files, if anything."""
        try:
            self._read(folder)
        except RunFolderError as error:
            return str(error)
        return None

    def _ended(self, entry: _Running) -> Outcome:
        job, status = entry.job, entry.process.poll()
        if status == 0 and (job.folder / SUMMARY).exists():
            if (damage := self._damage(job.folder)) is not None:
                return Outcome(job, "failed", f"{damage}; without this folder the same command makes the run anew")
            if self.missing is not None:
                self.missing.remove(needs_of(job.experiment))
            return Outcome(job, "finished")
        if self.interrupted_by is not None and status in (128 + signal.SIGTERM, -signal.SIGTERM):
            return Outcome(job, "interrupted", "the same command continues it")
        if status == 2 and (absent := find_missing(job.experiment, job.config["data"].get("root"))):
            self._absent |= set(absent)
            if self.missing is not None:
                self.missing.add(absent)
            return Outcome(job, "cannot run here", f"needs {', '.join(absent)}, see {job.folder / LOG}")
        said = f"exit status {status}, see {job.folder / LOG}\n{last_lines(job.folder / LOG)}"
        return Outcome(job, "failed", said, diverged_experiment(job.folder) is not None)

    def _say(self, progress: Progress, outcome: Outcome, seconds: float) -> None:
        text = f"{outcome.state:<8} {outcome.job.name}, {seconds:.0f} s{': ' if outcome.reason else ''}{outcome.reason}"
        progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def passed_on(number: int, frame: FrameType | None) -> None:
            self.interrupted_by = number
            signals.leave_terminal(number)
            for entry in self._running:
                entry.process.terminate()

        before: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for each in signals.NUMBERS:
                if not signals.is_ignored(each):
                    before[each] = signal.signal(each, passed_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def rounds_done(folder: Path) -> int:
    """Number of finished rounds of a run, read from its ``rounds.csv``; 0 without such a file."""
    try:
        with (folder / ROUNDS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").splitlines()
        return int(next(csv.reader([lines[-1]]))[0]) + 1
    except (OSError, IndexError, ValueError, StopIteration):
        return 0


def exit_status(outcomes: Sequence[Outcome], interrupted_by: int | None) -> int:
    """Exit status: 128 plus the signal if one came, 1 if a run failed or another process is running it, otherwise 0."""
    if interrupted_by is not None:
        return 128 + interrupted_by
    return 1 if any(outcome.state in ("failed", "runs elsewhere") for outcome in outcomes) else 0
