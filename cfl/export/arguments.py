"""What the commands ``cfl export`` and ``cfl predict`` share: options that choose a model, and the line of an error."""

from __future__ import annotations

import argparse
import sys

from cfl.cli.reasons import error_to_print
from cfl.runtime.command_line import ABOUT_ALLOW
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import printable


def model_parser(prog: str, description: str, about_task: str) -> argparse.ArgumentParser:
    """A parser with the options that choose a model of a run.

    Args:
        prog: the command.
        description: what it does, for the help.
        about_task: help of ``--task``.
    """
    epilog = "Any other option is one of the configuration, as for cfl validate: --data.root, --config. " + ABOUT_ALLOW
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument(
        "--ckpt_path",
        required=True,
        metavar="FILE",
        help="a checkpoint, e.g. RUN/last.ckpt, or its run folder; last, with --run.dir RUN",
    )
    parser.add_argument("--client", type=int, metavar="C", help="this client's model, where clients have their own")
    parser.add_argument("--task", type=int, metavar="T", help=about_task)
    return parser


def print_error(error: Exception) -> None:
    """Print one line on standard error. A client or a task that is refused is named as the option that gave it.

    Raises:
        Exception: the given error, if it is not meant for the user.
    """
    reason = error_to_print(error)
    if isinstance(reason, ConfigError) and reason.key in ("client", "task"):
        reason = ConfigError(f"--{reason.key}", reason.value, reason.valid)
    print(printable(f"error: {reason}"), file=sys.stderr)
