"""``cfl fit | validate | test``: runs a command line, or restores a run from its checkpoint.

Other commands are dispatched in :mod:`cfl.__main__`, which imports this module only to train or to restore a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback

from cfl.callbacks.federated_orchestrator import built_federation
from cfl.cli.commands import OTHERS, TRAINING
from cfl.cli.federated_cli import FederatedCLI
from cfl.cli.import_policy import TRUSTED, classes_beyond, importing_only, typed_paths
from cfl.cli.installed_configs import DEFAULT_CONFIG
from cfl.cli.parsing import Parser, place_of
from cfl.cli.quiet import silence_libraries
from cfl.cli.reasons import debugging, reason_for_user
from cfl.data.datamodule import FederatedDataModule
from cfl.metrics.measures.accuracy import ACCURACY
from cfl.reporting import folder_lock
from cfl.runtime.checkpoint_file import read_checkpoint, refusing_what_cfl_does_not_write
from cfl.runtime.command_line import CommandLine, read_command_line
from cfl.runtime.distributed import cause_elsewhere
from cfl.runtime.printable import printable
from cfl.runtime.signals import is_first_process
from cfl.training.client import Client

FORMULAS_HELP = "With a[t, i] the accuracy on task i after task t, b[i] before training: " + "; ".join(
    f"{key.upper()}: {formula}" for key, formula in ACCURACY.formulas.items()
)


class _Restoring(FederatedCLI):
    """Builds all that ``cfl validate`` builds, and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


ALONE = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "logger=false")
"""Trainer settings with which a run is restored, whatever the run itself had."""


def restored(arguments: Sequence[str]) -> tuple[Client, str, Path]:
    """Restore a run from its checkpoint, on the CPU, without evaluating anything.

    Data are read only if the setup of a method needs them.

    Args:
        arguments: options as for ``cfl validate``, with ``--ckpt_path``.

    Returns:
        The client module with its federation, the run's configuration as YAML, and the checkpoint's file.

    Raises:
        ConfigError: ``cfl validate`` would refuse the options.
        NotUnderstood: the command line cannot be parsed.
    """
    line = read_command_line(["validate", *arguments])
    alone = [f"--trainer.{setting}" for setting in ALONE]
    built = build(_Restoring, line._replace(arguments=[*line.arguments, *alone]))
    client: Client = built.model
    # In the Trainer's order: the federation is built first, then the checkpoint is loaded into it.
    built.trainer.datamodule = built.datamodule  # type: ignore[attr-defined]
    built_federation(built.trainer, client, "validate")
    path = Path(built.config_init[built.subcommand]["ckpt_path"])  # the file, even if ``last`` was given
    checkpoint = read_checkpoint(path)
    with refusing_what_cfl_does_not_write(path):
        client.on_load_checkpoint(checkpoint)
        client.load_state_dict(checkpoint["state_dict"])
    client.train(False)
    return client, built.settled.config_yaml, path


def trained(arguments: Sequence[str], callbacks: Sequence[Callback] = ()) -> tuple[Path, list[str]]:
    """Run a command line of ``cfl fit``.

    Args:
        arguments: the command line without the program's name.
        callbacks: callbacks of the Trainer, besides those of the configuration.

    Returns:
        The run folder, and :func:`cfl.cli.import_policy.classes_beyond` of the run's configuration.

    Raises:
        Exception: the error that stopped the run. If a cause of it is meant for users, that is raised instead.
        SystemExit: a signal stopped the run. The status is the signal's exit status.
    """
    try:
        built = build(FederatedCLI, read_command_line(arguments), callbacks)
    except Exception as error:
        reason = reason_for_user(error)
        if reason is None or reason is error or debugging():
            raise
        raise reason from error
    finally:
        folder_lock.release()
    config = built.settled.config
    return Path(config.run.dir), classes_beyond(config)


def build(
    kind: type[FederatedCLI], line: CommandLine, callbacks: Sequence[Callback] = (), announced: str = ""
) -> FederatedCLI:
    """Parse a command line, build the classes that it names, and run the subcommand.

    Classes that a configuration may not name are refused (:mod:`cfl.cli.import_policy`).

    Args:
        kind: the class that parses and runs the command line.
        line: the command line.
        callbacks: callbacks of the Trainer, besides those of the configuration.
        announced: the header's first line if it has been printed.
    """
    silence_libraries()
    # If the command is known, only its parser is built, because each takes a fifth of a second.
    known = [name for name in line.arguments[:1] if name in TRAINING] or [*TRAINING]
    commands = {name: skipped for name, skipped in kind.subcommands().items() if name in known}
    kind = type(kind.__name__, (kind,), {"subcommands": staticmethod(lambda: commands), "announced": announced})
    with importing_only((*TRUSTED, *line.allowed, *typed_paths(line.typed)) if line.of_run else None):
        return kind(
            Client,
            FederatedDataModule,
            args=line.arguments,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None,
            trainer_defaults={"callbacks": [*callbacks]},
            parser_class=Parser,
            parser_kwargs={
                "prog": "cfl",
                "description": "Train and compare methods of continual federated learning.",
                "epilog": f"Further commands, each with --help: {', '.join(f'cfl {name}' for name in OTHERS)}.",
                **{
                    name: {
                        "default_config_files": [str(DEFAULT_CONFIG)],
                        "epilog": FORMULAS_HELP,
                        "description": TRAINING[name],
                    }
                    for name in commands
                },
            },
        )


def main(arguments: Sequence[str], announced: str = "") -> int:
    """Run one command; return the exit status.

    Args:
        arguments: the command line without the program's name.
        announced: the header's first line where it has been printed (:func:`cfl.cli.header.announce`).
    """
    try:
        line = read_command_line(arguments)
        build(FederatedCLI, line, announced=announced)
    except Exception as error:
        elsewhere = cause_elsewhere(error)
        reason = reason_for_user(error) or elsewhere
        if reason is None or debugging():
            raise
        if elsewhere is None or is_first_process():  # one word about another process's failure is enough
            print(printable(f"error: {reason}{place_of(reason)}"), file=sys.stderr)
        return 2
    finally:
        folder_lock.release()
    return 0
