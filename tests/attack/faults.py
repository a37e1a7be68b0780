"""Runs whose disk fails at one of their operations, and which are then resumed with the same command."""

from __future__ import annotations

import random
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from attack import children, disks, points, sameness, trials
from attack.outcomes import Outcome, failure, refusal

_TRIALS = ("rows on disk", "FOT", "classes")
"""Runs that write files of all kinds: rows of clients, a method's table, several matrices."""


def _prepared(disk: disks.Disk | None) -> children.Preparation:
    def prepare(stack: ExitStack) -> None:
        points.checkpoints(stack, often=True)
        if disk is not None:
            disks.use(disk)(stack)

    return prepare


def _operations(trial: str, folder: Path) -> list[str]:
    """Run a trial in a folder without a fault; return its operations on the disk."""
    disk, file = disks.Disk(folder), folder.with_suffix(".txt")

    def prepare(stack: ExitStack) -> None:
        stack.callback(lambda: file.write_text("\n".join(disk.done)))
        _prepared(disk)(stack)

    ended = children.run(trials.arguments(trial, folder), prepare, 30)
    if ended.status != 0:
        raise RuntimeError(f"the run of {trial} on a disk that does not fail fails: {ended.said[-2000:]}")
    return file.read_text().splitlines()


def cases(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Names of cases, each with the function that runs it: every operation with every fault, or a choice of these.

    Args:
        count: greatest number of cases.
        seed: seed of the choice, if there are more.
        folder: where runs are made.
    """
    if not count:
        return
    found = []
    for trial in _TRIALS:
        whole = folder / "whole-disks" / trial.replace(" ", "-")
        operations = _operations(trial, whole)
        found += [
            (trial, whole, number, operation, fault)
            for number, operation in enumerate(operations)
            for fault in disks.possible(operation)
        ]
    if len(found) > count:
        found = random.Random(f"faults {seed}").sample(found, count)
    for trial, whole, number, operation, fault in found:
        name = f"faults/{trial.replace(' ', '-')}-{number}-{fault}"
        yield name, partial(_run, name, trial, whole, number, operation, fault, folder / name)


def _run(name: str, trial: str, whole: Path, number: int, operation: str, fault: str, folder: Path) -> Outcome:
    command = trials.arguments(trial, folder)
    told = f"{fault} at operation {number} ({operation}): cfl {shlex.join(command)}"
    ended = children.run(command, _prepared(disks.Disk(folder, number, fault)), 30)
    again = children.run(command, _prepared(None), 30)
    after = sameness.verdict(folder, whole) if again.status == 0 else failure(again)
    verdict, detail = after or ("different", f"it cannot be resumed: {again.said.strip()[-300:]}")
    if ended.status != 0:
        file = operation.partition(" ")[2]
        said = failure(ended) or refusal(ended, [file, folder.name])
        if verdict == "equal":
            verdict, detail = ("equal", "") if said[0] == "refused" else (said[0], f"{said[1]}; resumed: equal")
        else:
            detail = f"{detail}; before: {said[0]}: {said[1]}"
    if verdict == "equal":
        shutil.rmtree(folder)
    return Outcome(name, verdict, detail, told)
