"""Completes a command line with the configuration of its run, and decides which packages that may import."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from os.path import isdir, isfile
from pathlib import Path
from typing import NamedTuple

from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import CHECKPOINT, CONFIG

ALLOW = "--allow"
ABOUT_ALLOW = (
    "The configuration beside a checkpoint is taken where no --config is given. It may name classes of cfl, "
    f"torch.optim and Lightning's loggers only; {ALLOW} PACKAGE, which may be given several times, adds another "
    "package's."
)
_COMMANDS = ("fit", "validate", "test")
CHECKPOINT_OPTION = "--ckpt_path"


class CommandLine(NamedTuple):
    """The completed arguments of a command.

    Attributes:
        arguments: arguments for the parser, with the run's configuration if it is used, and without ``--allow``.
        of_run: whether the configuration beside a checkpoint is used, which the user has not named.
        allowed: the packages of ``--allow``.
        typed: the words of the user, without ``--allow``.
    """

    arguments: list[str]
    of_run: bool
    allowed: tuple[str, ...]
    typed: tuple[str, ...] = ()


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Add the configuration and the folder of a checkpoint's run, if the command line names no configuration.

    A run folder as ``--ckpt_path`` stands for the checkpoint in it.

    Args:
        arguments: the command line without the program's name.

    Raises:
        ConfigError: ``--allow`` is given where it has no effect.
    """
    given, allowed = _without_allowed(arguments)
    named = option_value(given, CHECKPOINT_OPTION)
    if named and named != "last" and isdir(named):
        given.append(f"{CHECKPOINT_OPTION}={Path(named) / CHECKPOINT}")
    configured = is_configured(given)
    if allowed and (configured or named is None):
        valid = "beside --ckpt_path only, and without --config: what is named so may name any class"
        raise ConfigError(ALLOW, " ".join(allowed), valid)
    if given[:1] and given[0] in _COMMANDS and not configured:
        checkpoint, folder = (option_value(given, option) for option in (CHECKPOINT_OPTION, "--run.dir"))
        if checkpoint != "last":
            folder = checkpoint and str(Path(checkpoint).parent)
        if folder and checkpoint and isfile(Path(folder) / CONFIG):
            # The folder may have been moved since, or have another relative path from here.
            place = ["--config", str(Path(folder) / CONFIG), "--run.dir", folder]
            return CommandLine([given[0], *place, *given[1:]], True, allowed, tuple(given))
    return CommandLine(given, False, allowed, tuple(given))


def place_of_current_folder(arguments: Sequence[str]) -> int | None:
    """The position of the current folder in ``sys.path`` for ``python -m cfl``.

    It is first, as is usual in Python, for a command with the user's own configuration. It is left out for a command
    that reads a run, because the run's author may have put modules beside it. With ``--allow`` it comes last.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The position, or None.
    """
    given, allowed = _without_allowed(arguments)
    reads_run = given[:1] == ["compare"] or option_value(given, CHECKPOINT_OPTION) is not None
    if not reads_run or (given[0] != "compare" and is_configured(given)):
        return 0
    return len(sys.path) if allowed else None


def _without_allowed(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the arguments into those without ``--allow`` and the values of ``--allow``."""
    rest: list[str] = []
    allowed: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option != ALLOW:
            rest.append(word)
        else:
            allowed.append(value if equals else next(words, ""))
    return rest, tuple(allowed)


def words_with_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with its value as an option, ``--key value`` or ``--key=value``, in order.

    Values are also yielded as if they were options. Callers look for known names only.
    """
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def is_configured(arguments: Sequence[str]) -> bool:
    """Whether the command line names a configuration."""
    return any(word.startswith(("--config", "-c")) for word in arguments)


def option_value(arguments: Sequence[str], option: str) -> str | None:
    """The last value of an option, ``--key value`` or ``--key=value``."""
    return next((value for key, value in reversed(list(words_with_values(arguments))) if key == option), None)
