"""The command line on a tiny federation: configuration, run folder, checkpoint, and processes that get killed."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from cfl.callbacks import RoundCheckpoint, RunRecord
from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.main import main
from cfl.testing.comparing import difference
from cfl.training.client import Client

TINY = Path(__file__).with_name("tiny.yaml")
PARAMETERS = 16 * 8 + 8 + 8 * 4 + 4
"""Weights of tiny.yaml's network."""


_DRAWN = (
    "cfl.data.report.partition_figure",
    *(f"cfl.callbacks.run_pictures.{name}" for name in ("accuracy_heatmap", "accuracy_curve", "learning_curves")),
)
"""The functions that draw the pictures of a run."""
_BUILT: dict[tuple[Any, ...], dict[str, Any]] = {}
_setup_parser = FederatedCLI.setup_parser


def _built_once(cli: FederatedCLI, add_subcommands: bool, main: dict[str, Any], of_subcommands: dict[str, Any]) -> None:
    """Replacement of ``setup_parser`` that builds a parser once for all runs, since it does not depend on arguments."""
    key = (type(cli).__name__, add_subcommands, repr(main), repr(of_subcommands))
    if key not in _BUILT:
        before = set(vars(cli))
        _setup_parser(cli, add_subcommands, main, of_subcommands)
        _BUILT[key] = {name: value for name, value in vars(cli).items() if name not in before}
    vars(cli).update(_BUILT[key])


def run(*arguments: str, pictures: bool = False) -> int:
    """``cfl ...`` in this process, shortened."""
    with shortened(arguments, pictures):
        try:
            return main(list(arguments))
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, int) else 1


@contextmanager
def shortened(arguments: Sequence[str], pictures: bool = False) -> Iterator[None]:
    """Leave out what would take most of a tiny run's time, within the context.

    The options of other subcommands are not built, the parser is built only once, and pictures are not drawn unless
    ``pictures`` is set.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FederatedCLI, "setup_parser", _built_once))
        stack.callback(_forget_what_was_not_printed)
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("FORCE_COLOR", None)  # continuous integration may set it; tests expect text without colours
        subcommand = {name: skipped for name, skipped in FederatedCLI.subcommands().items() if name in arguments[:1]}
        if subcommand:
            stack.enter_context(mock.patch.object(FederatedCLI, "subcommands", return_value=subcommand))
        if not pictures:
            for name in _DRAWN:
                stack.enter_context(mock.patch(name, return_value=Figure()))
            stack.enter_context(mock.patch.object(Figure, "savefig"))
        yield


def _forget_what_was_not_printed() -> None:
    """Drop parsers whose ``--print_config`` was not carried out, because they would carry it out in the next run."""
    for key in [key for key, built in _BUILT.items() if hasattr(built["parser"], "print_config")]:
        del _BUILT[key]


def fit(folder: Path, *options: str, pictures: bool = False) -> int:
    """``cfl fit`` on tiny.yaml into ``folder``."""
    return run("fit", "--config", str(TINY), "--run.dir", str(folder), *options, pictures=pictures)


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file's rows."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(folder: Path) -> dict[str, Any]:
    """The run's ``summary.json``."""
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def checkpoint(folder: Path) -> dict[str, Any]:
    """The run's ``last.ckpt``."""
    content: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return content


def results(folder: Path) -> dict[str, Any]:
    """Everything a run leaves that must not depend on whether it was interrupted."""
    saved = checkpoint(folder)
    return {
        "matrix": (folder / "accuracy_matrix.csv").read_text(),
        "tables": {path.name: rows(path) for path in sorted(folder.glob("*.csv"))},
        "clients": {path.name: path.read_text() for path in sorted(folder.glob("clients/*.csv"))},
        "summary": {key: value for key, value in summary(folder).items() if key != "finished_at"},
        "weights": saved["state_dict"],
        "federation": saved["federation"],
    }


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """Require nested results to be equal, seconds apart: see :func:`cfl.testing.comparing.difference`."""
    differs = difference(ours, theirs, tolerance)
    assert differs is None, differs


# Processes that die.

STAGES = ("training", "closed", "writing", "written", "ended")
"""Moments of a round, in this order: in a local step; its row written, its checkpoint not; half of the checkpoint's
file written; that file in place; after the last round, everything written but the summary."""


def die_at(stage: str, round: int, number: int = signal.SIGKILL) -> ExitStack:
    """Let this process send itself a signal at a moment of a round, until the returned stack is closed.

    Args:
        stage: one of STAGES.
        round: from 0.
        number: the signal.
    """
    sent = []

    def send() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    def around(owner: Any, name: str, before: bool, in_round: Callable[..., int]) -> Any:
        original = getattr(owner, name)

        def method(*arguments: Any, **named: Any) -> Any:
            due = in_round(*arguments) == round
            if before and due:
                send()
            result = original(*arguments, **named)
            if not before and due:
                send()
            return result

        return mock.patch.object(owner, name, method)

    def next_round(callback: Any, trainer: Any, *_: Any) -> int:
        return int(trainer.lightning_module.federation.round) - 1

    def save_half(trainer: Trainer, path: Path) -> None:
        save_checkpoint(trainer, path)
        if trainer.lightning_module.federation.round - 1 == round:
            os.truncate(path, path.stat().st_size // 2)
            send()

    stack = ExitStack()
    if stage in ("writing", "written"):
        stack.enter_context(mock.patch.object(RoundCheckpoint, "_due", return_value=True))
    if stage == "training":
        stack.enter_context(around(Client, "training_step", True, lambda client, *_: client.federation.round))
    elif stage == "closed":
        stack.enter_context(around(RunRecord, "on_train_epoch_end", False, next_round))
    elif stage == "ended":
        stack.enter_context(around(RunRecord, "_finish", True, lambda _, client, device: client.federation.round - 1))
    elif stage == "written":
        stack.enter_context(around(RoundCheckpoint, "_save", False, next_round))
    else:
        save_checkpoint = Trainer.save_checkpoint
        stack.enter_context(mock.patch.object(Trainer, "save_checkpoint", save_half))
    return stack


def _child(arguments: tuple[str, ...], moment: tuple[str, int] | None) -> None:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), ExitStack() as stack:
        if moment is not None:
            stack.enter_context(die_at(*moment))
        raise SystemExit(run(*arguments))


def start(*arguments: str, moment: tuple[str, int] | None = None) -> BaseProcess:
    """``cfl ...`` in a process of its own, which kills itself at a moment (stage, round) if one is given.

    Processes are forked from one that has imported the program already, which saves seconds each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cfl.cli.main"])
    process = context.Process(target=_child, args=(arguments, moment))
    process.start()
    return process


def killed(stage: str, round: int, *arguments: str) -> int | None:
    """Run ``cfl ...`` in a process that kills itself; return the exit status, which is -9 if it did."""
    process = start(*arguments, moment=(stage, round))
    process.join()
    return process.exitcode


def printed_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What ``--print_config`` prints."""
    capsys.readouterr()
    assert run("fit", *arguments, "--print_config") == 0
    config: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return config


VARIANTS = {
    "fedavg": (
        *("--federated.server_momentum", "0.9", "--federated.client_weighting", "samples"),
        *("--model.network.dropout", "0.3", "--schedule.evaluate_every", "2"),
    ),
    "fot": ("--methods.fot", "FOT", "--methods.fot.threshold", "0.9"),
    "personal": ("--methods.own", "PersonalLayers", "--methods.own.layers", "['head.*']"),
    "class-incremental": (
        *("--data.stream", "ClassSplit", "--data.stream.source", "Synthetic", "--data.stream.num_tasks", "2"),
        *("--data.stream.source.num_classes", "4", "--data.stream.source.train_size", "160"),
        *("--data.scenario", "class"),
    ),
}
