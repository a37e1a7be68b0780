"""Rounds of several processes, one at a time, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.running import NotRun, Running
from benchmarks.wire import Report

Answer = TypeVar("Answer")

SETTLE_SECONDS = 0.05
"""Pause between rounds of two processes, because math threads may spin for some milliseconds after their last work."""


@dataclass
class Measured:
    """Reports of one process.

    Attributes:
        info: its first report, about itself.
        warmup: reports of the warm-up rounds.
        rounds: reports of the measured rounds.
        memory: ``peak_rss_mb`` and ``rss_mb`` at the end.
        failure: why the process did not run to the end, or None.
    """

    info: Report = field(default_factory=dict)
    warmup: list[Report] = field(default_factory=list)
    rounds: list[Report] = field(default_factory=list)
    memory: Report = field(default_factory=dict)
    failure: str | None = None


def interleave(
    start: Mapping[str, Callable[[], Running]],
    rounds: int,
    warmup: int,
    say: Callable[[str], None],
    between: Callable[[int], object] = lambda number: None,
    together: Collection[str] = (),
) -> dict[str, Measured]:
    """Let processes take rounds in turns: in order, then in reverse, and so on.

    A process that fails is left out from then on; the others go on.

    Args:
        start: name -> starts the process.
        rounds: number of measured rounds.
        warmup: number of rounds before those.
        say: prints a line with the seconds of every turn.
        between: called before each turn with the turn's number, and once at the end.
        together: names of processes that may start at the same time. The others start before them, one after another,
            because some measure which settings are fastest while they start.
    """
    found = {name: Measured() for name in start}
    with ExitStack() as stack:
        running: dict[str, Running] = {}

        def attempt(name: str, act: Callable[[], Answer]) -> Answer | None:
            try:
                return act()
            except NotRun as reason:
                found[name].failure = str(reason)
                process = running.pop(name, None)
                if process is not None:
                    process.end()
                say(f"  {name}: not run: {reason}")
                return None

        for name in sorted(start, key=lambda name: name in together):
            process = attempt(name, start[name])
            if process is not None:
                running[name] = stack.enter_context(process)
                if name not in together:
                    found[name].info = attempt(name, process.ready) or {}
        for name in [name for name in together if name in running]:
            found[name].info = attempt(name, running[name].ready) or {}
        running = {name: running[name] for name in start if name in running}
        for turn in range(warmup + rounds):
            between(turn)
            order = list(running) if turn % 2 == 0 else list(reversed(running))
            for name in order:
                time.sleep(SETTLE_SECONDS)
                report = attempt(name, running[name].round)
                if report is not None:
                    (found[name].warmup if turn < warmup else found[name].rounds).append(report)
            last = {n: (found[n].rounds or found[n].warmup)[-1]["seconds"] for n in running}
            counted = "warm-up" if turn < warmup else f"round {turn - warmup + 1}/{rounds}"
            say(f"  {counted:<12}" + "  ".join(f"{name} {seconds:.3f} s" for name, seconds in last.items()))
        between(warmup + rounds)
        for name in list(running):
            found[name].memory = attempt(name, running[name].finish) or {}
    return found
