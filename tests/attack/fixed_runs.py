"""Fixed cases of spoilt run folders, of options left from another network, and of advice that a run prints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from support.foreign import BOMB

from attack import children, points
from attack.fixed_case import TINY, Case, Wanted


def _in_a_run(spoil: Callable[[Path], object], *command: str, wanted: Wanted = "warned") -> Case:
    """A case of a run folder with a spoilt file, and a command that reads it."""

    def make(folder: Path) -> list[list[str]]:
        children.run(TINY, folder=folder)
        spoil(folder / "run")
        return [list(command)]

    return Case(make, ("config.yaml", "summary.json", "rounds.csv", "ckpt_path", "run.dir"), wanted)


def _after_a_bad_update(folder: Path) -> list[list[str]]:
    """Resume a stopped run with the option that a run advises when a client's NaN has stopped it."""
    stopped = points.strike_at("before a local step", 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    children.run(TINY, stopped, folder=folder)
    return [[*_RESUME, "--federated.on_bad_update", "skip"]]


def _old_network(then: str) -> Callable[[Path], list[list[str]]]:
    """Choose another network than the one whose options stand in an earlier configuration file."""

    def make(folder: Path) -> list[list[str]]:
        (folder / "old.yaml").write_text("model: {network: {class_path: MLP, init_args: {hidden: [8]}}}\n")
        (folder / "new.yaml").write_text(f"model: {{network: {then}}}\n")
        return [[*TINY, "--config", "old.yaml", "--config", "new.yaml"]]

    return make


_RESUME = ("fit", "--ckpt_path", "run/last.ckpt")

CASES: dict[str, Case] = {
    "an old network's options": Case(_old_network("{class_path: LeNet}"), ("old.yaml",)),
    "an old network's options dropped": Case(_old_network("LeNet"), ("old.yaml",)),
    "advice after a bad update": Case(_after_a_bad_update, ("on_bad_update",), "runs"),
    "run folder with a bomb": _in_a_run(lambda run: (run / "config.yaml").write_text(BOMB), *_RESUME),
    "run folder with a list within itself": _in_a_run(
        lambda run: (run / "config.yaml").write_text("model: &a [*a]\n"), *_RESUME
    ),
    "run folder with a pipe": _in_a_run(
        lambda run: ((run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")), *_RESUME
    ),
    "run folder with a linked lock": _in_a_run(
        lambda run: (run / ".fit-lock").symlink_to(run / "config.yaml"), *_RESUME, wanted="either"
    ),
    "run folder with a pipe for a lock": _in_a_run(lambda run: os.mkfifo(run / ".fit-lock"), *_RESUME, wanted="either"),
    "run folder with a pipe of rounds": _in_a_run(
        lambda run: ((run / "rounds.csv").unlink(), os.mkfifo(run / "rounds.csv")), *_RESUME, wanted="either"
    ),
    "compared run with a bomb": _in_a_run(
        lambda run: (run / "config.yaml").write_text(BOMB), "compare", "run", wanted="either"
    ),
    "compared run with a list within itself": _in_a_run(
        lambda run: (run / "config.yaml").write_text("methods: &a [*a]\n"), "compare", "run"
    ),
    "compared run with deep figures": _in_a_run(
        lambda run: (run / "summary.json").write_text("[" * 100_000), "compare", "run"
    ),
    "compared run with a pipe": _in_a_run(
        lambda run: ((run / "rounds.csv").unlink(), os.mkfifo(run / "rounds.csv")), "compare", "run", wanted="either"
    ),
}
"""Name -> case."""
