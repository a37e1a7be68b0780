"""Moments of a run at which something can be done to it: named ones, and any call of a Python function."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from cfl.callbacks import RoundCheckpoint, RunRecord
from cfl.callbacks.rounds_table import RoundsTable
from cfl.callbacks.streamed_checkpoints import StreamedCheckpoints
from cfl.cli.federated_cli import FederatedCLI
from cfl.data.datamodule import FederatedDataModule
from cfl.federation.federation import Federation
from cfl.federation.row_store import FileRows
from cfl.federation.server import Server
from cfl.methods.composition import Composition
from cfl.runtime.run_files import CHECKPOINT, CONFIG, PARTITION, SUMMARY, matrix_file
from cfl.training.client import Client
from cfl.training.local_work import LocalWork

_ROW, _CHECKPOINT = "a row of rounds.csv", "writing the checkpoint's file"
_METHODS: dict[str, tuple[type, str]] = {
    "starting": (FederatedCLI, "before_instantiate_classes"),
    "taking the folder": (RunRecord, "prepare"),
    "reading data": (FederatedDataModule, "setup"),
    "beginning the record": (RunRecord, "begin"),
    "beginning a round": (LocalWork, "begin_round"),
    "a local step": (Client, "training_step"),
    "collecting updates": (LocalWork, "collect"),
    "the server's step": (Server, "apply"),
    "the methods' end of a task": (Composition, "end_task"),
    "an evaluation": (Client, "validation_step"),
    "writing clients' rows": (FileRows, "write"),
    _ROW: (RoundsTable, "append"),
    "a checkpoint": (RoundCheckpoint, "_save"),
    _CHECKPOINT: (StreamedCheckpoints, "save_checkpoint"),
    "loading the checkpoint": (Client, "on_load_checkpoint"),
    "the summary": (RunRecord, "_finish"),
}
_FILES = (CONFIG, PARTITION, matrix_file("accuracy"), CHECKPOINT, SUMMARY)
CALL = "a call"
"""Any call of a Python function."""


def watch(stack: ExitStack, reached: Callable[[str], None]) -> None:
    """Call a function at every named point of a run from now on.

    Points lie before and after the methods above, before and after a file takes its place, and where half of a file or
    of a row has been written.

    Args:
        stack: stops the calls when it ends.
        reached: called with the point's name.
    """
    for name, (owner, attribute) in _METHODS.items():
        stack.enter_context(mock.patch.object(owner, attribute, _around(name, getattr(owner, attribute), reached)))
    replace = os.replace

    def watched_replace(source: Any, target: Any, **options: Any) -> None:
        name = Path(target).name
        if name not in _FILES:
            return replace(source, target, **options)
        reached(f"before {name} takes its place")
        replace(source, target, **options)
        return reached(f"after {name} takes its place")

    stack.enter_context(mock.patch.object(os, "replace", watched_replace))


def _around(name: str, original: Callable[..., Any], reached: Callable[[str], None]) -> Callable[..., Any]:
    def method(*arguments: Any, **options: Any) -> Any:
        reached(f"before {name}")
        result = original(*arguments, **options)
        if name == _CHECKPOINT:
            _reach_half(f"half of {name}", Path(arguments[2]), 0, reached)
        elif name == _ROW:
            path = arguments[0].path
            before = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0]
            _reach_half(f"half of {name}", path, len(before), reached)
        reached(f"after {name}")
        return result

    return method


def _reach_half(name: str, path: Path, start: int, reached: Callable[[str], None]) -> None:
    """Reach a point while a file is cut to half of what follows ``start``; then restore the file."""
    whole = path.read_bytes()
    os.truncate(path, start + (len(whole) - start) // 2)
    reached(name)
    path.write_bytes(whole)


def watch_calls(stack: ExitStack, reached: Callable[[str], None]) -> None:
    """Have a function called at every call of a Python function of this thread, with the name CALL."""

    def profile(_: Any, event: str, __: Any) -> None:
        if event == "call":
            reached(CALL)

    sys.setprofile(profile)
    stack.callback(sys.setprofile, None)


def count_into(file: Path) -> Callable[[ExitStack], None]:
    """Make a preparation that counts how often every point is reached, and writes a line per point into a file."""

    def prepare(stack: ExitStack) -> None:
        counts: Counter[str] = Counter()
        calls = 0

        def called(_: str) -> None:
            nonlocal calls
            calls += 1

        def write() -> None:
            counts[CALL] = calls
            file.write_text("".join(f"{count} {name}\n" for name, count in counts.items()))

        stack.callback(write)
        watch(stack, lambda name: counts.update((name,)))
        watch_calls(stack, called)

    return prepare


def strike_at(point: str, time: int, strike: Callable[[], None]) -> Callable[[ExitStack], None]:
    """Make a preparation that calls a function, once, when a point is reached for the ``time``-th time, from 1."""

    def prepare(stack: ExitStack) -> None:
        left = [time]

        def reached(name: str) -> None:
            if name == point and left[0]:
                left[0] -= 1
                if not left[0]:
                    strike()

        (watch_calls if point == CALL else watch)(stack, reached)

    return prepare


def checkpoints(stack: ExitStack, often: bool) -> None:
    """Write checkpoints after every round if ``often``, else after the first; and always where runs must write one."""

    def due(callback: RoundCheckpoint, federation: Federation) -> bool:
        return often or not callback._writes

    stack.enter_context(mock.patch.object(RoundCheckpoint, "_due", due))
