"""Runs that are killed or stopped, and then resumed with the same command."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from attack import children, points, sameness, trials
from attack.outcomes import Outcome, failure, refusal

SIGNALS = (*[signal.SIGKILL] * 3, signal.SIGTERM, signal.SIGINT)
"""Signals that processes are sent; each is drawn as often as it stands here."""
_LATE = "the run was over before"
_OF_RESUMED = {f"{when} loading the checkpoint": 1 for when in ("before", "after")}
"""Points that only a resumed run reaches."""
_LAST_CALLS = 0.95
"""Share of a run's calls in which random moments lie; the last calls belong to the interpreter's exit."""


class Kill(NamedTuple):
    """A signal at a moment of a run.

    Attributes:
        point: see :mod:`attack.points`.
        time: the signal is sent when the point is reached for this time, counted from 1.
        number: the signal.
    """

    point: str
    time: int
    number: signal.Signals

    def __str__(self) -> str:
        return f"{self.number.name} at {self.point}, time {self.time}"

    @property
    def statuses(self) -> set[int]:
        """Exit statuses that are right after the signal; 0 is right because it may come too late."""
        return {0, -self.number if self.number == signal.SIGKILL else 128 + self.number}


class Whole:
    """Runs of trials that are left alone, each made when it is first needed.

    Args:
        folder: where they are made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: dict[str, dict[str, int]] = {}

    def run(self, trial: str) -> Path:
        """The folder of a trial's run."""
        folder = self._folder / trial.replace(" ", "-")
        if trial not in self._counts:
            counted = folder.with_suffix(".txt")
            ended = children.run(trials.arguments(trial, folder), _prepared(True, points.count_into(counted)), 60)
            if ended.status != 0:
                raise RuntimeError(f"the run of {trial} that nobody attacks fails: {ended.said[-2000:]}")
            lines = (line.split(" ", 1) for line in counted.read_text().splitlines())
            self._counts[trial] = {name: int(count) for count, name in lines}
        return folder

    def counts(self, trial: str) -> dict[str, int]:
        """Point -> how often a trial's run reaches it if it writes a checkpoint after every round."""
        self.run(trial)
        return self._counts[trial]


def _prepared(often: bool, then: children.Preparation | None = None) -> children.Preparation:
    def prepare(stack: ExitStack) -> None:
        points.checkpoints(stack, often)
        if then is not None:
            then(stack)

    return prepare


def cases(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Names of cases, each with the function that runs it.

    Args:
        count: number of cases.
        seed: seed of the choice of moments.
        folder: where runs are made.
    """
    names, whole = list(trials.TRIALS), Whole(folder / "whole")
    random.Random(f"trials {seed}").shuffle(names)
    for number in range(count):
        trial = names[number % len(names)]
        name = f"kills/{number}-{trial.replace(' ', '-')}"
        yield name, partial(_run, name, trial, number, seed, whole, folder / name)


def _run(name: str, trial: str, number: int, seed: int, whole: Whole, folder: Path) -> Outcome:
    draw = random.Random(f"kill {number} {seed}")
    often = draw.random() < 0.7
    counts = {point: count for point, count in whole.counts(trial).items() if often or "checkpoint" not in point}
    kills = [_chosen(draw, counts)]
    if draw.random() < 0.2:
        kills.append(_chosen(draw, counts | _OF_RESUMED))
    command = trials.arguments(trial, folder)
    told = f"{' then '.join(map(str, kills))}: cfl {shlex.join(command)}"
    late, odd = "", None
    for kill in kills:
        strike = points.strike_at(kill.point, kill.time, partial(_send, kill.number))
        ended = children.run(command, _prepared(often, strike), 30)
        if ended.status not in kill.statuses or "Traceback" in ended.said:
            odd = odd or _odd(kill, ended)
        late = _LATE if ended.status == 0 else late
    ended = children.run(command, _prepared(often), 30)
    if ended.status != 0:
        said = ended.said.strip()[-500:]
        return Outcome(name, *(failure(ended) or ("different", f"it cannot be resumed: {said}")), told)
    verdict, detail = sameness.verdict(folder, whole.run(trial))
    if verdict != "equal":
        return Outcome(name, verdict, detail, told)
    shutil.rmtree(folder)
    return Outcome(name, *((odd[0], f"{odd[1]}; resumed: equal") if odd else (verdict, late)), told)


def _odd(kill: Kill, ended: children.Ended) -> tuple[str, str]:
    """Return a verdict and its detail for a command whose exit status or output does not fit its signal."""
    if ended.status == -kill.number:
        return "unclear", f"died of {kill.number.name} without the status {128 + kill.number}"
    return failure(ended) or refusal(ended, [])


def _chosen(draw: random.Random, counts: dict[str, int]) -> Kill:
    """Draw a moment that a run reaches: a call, or a named point at its first, last or any time, equally often."""
    if draw.random() < 0.35:
        return Kill(points.CALL, draw.randint(1, int(_LAST_CALLS * counts[points.CALL])), draw.choice(SIGNALS))
    point = draw.choice(sorted(set(counts) - {points.CALL}))
    return Kill(point, draw.choice((1, counts[point], draw.randint(1, counts[point]))), draw.choice(SIGNALS))


def _send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
