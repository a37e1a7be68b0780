"""The parser behind the command line: no abbreviations, and one line for whatever it does not accept."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from cfl.client import ELEMENTWISE_OPTIMIZERS
from cfl.data.augmentation import Augmentation
from cfl.data.participation import Participation
from cfl.data.partitions import Partition
from cfl.data.sequences import TaskSequences
from cfl.data.sources import Source
from cfl.data.streams import Stream
from cfl.errors import BadUpdate, ConfigError, DataFilesMissing
from cfl.methods import Method
from cfl.models import Network

_PLUGINS: dict[str, type] = {
    "<name>": Method,
    "network": Network,
    "stream": Stream,
    "source": Source,
    "sources": Source,
    "partition": Partition,
    "participation": Participation,
    "augmentation": Augmentation,
    "sequences": TaskSequences,
}
_SAID_IN_FULL = (ConfigError, DataFilesMissing, BadUpdate, MisconfigurationException)
_TYPES = {"NoneType": "null", "int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}


class Parser(LightningArgumentParser):
    """Lightning's parser, with option names in full only and errors in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and exit with 2; with JSONARGPARSE_DEBUG=true, raise with the whole trace."""
        if not self.exit_on_error:  # the options of one class: the parser around it knows under which key they stand
            unknown = _unknown_option(message)
            names = [action.dest for action in self._actions if action.dest != "help"]
            raise argparse.ArgumentError(None, _no_option(unknown, names) if unknown else message) from ex
        if debugging():
            raise ex or ValueError(message)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [action.dest for action in parser._actions]
        print(f"error: {reason_for_user(ex) or one_line(message, options)}", file=sys.stderr)
        raise SystemExit(2)


def debugging() -> bool:
    """Whether JSONARGPARSE_DEBUG asks for traces instead of messages."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")


def reason_for_user(error: BaseException | None) -> BaseException | None:
    """The error in a chain of causes whose message is meant for the user, or None."""
    while error is not None and not isinstance(error, _SAID_IN_FULL):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def one_line(message: str, options: list[str]) -> str:
    """A message of jsonargparse as one line that names key, value and what would be valid, as far as it tells them.

    Args:
        message: nested, each level behind ``Parser key "..."``.
        options: what the parser accepts on its top level.
    """
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    key = re.sub("^methods", "methods.<name>", "seed_everything" if key == "model.seed" else key)
    if own := re.search(r"\S+ = .* cannot work; valid: .*", message):  # a ConfigError that lost its type on the way
        return own.group()
    if inner := re.search(r"(\S+) is no option; (valid: [\w., ]*\w)(?:\. Got value|$)", message, re.M):
        return f"{key}.{inner[1]} is no option; {inner[2]}"
    if name := _unknown_option(message):
        return _no_option(name, options)
    if given := re.search(r"dot import path string: (\S+)|has no attribute '\w+'\. Got value: (\S+)", message):
        if names := class_names(key):
            return str(ConfigError(key, given[1] or given[2], f"one of {', '.join(names)}"))
    elif value := re.search(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", message, re.M):
        expected = re.findall(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])", message)
        valid = [_TYPES.get(plain, f"a {plain}") if plain else literal for plain, literal in expected]
        if valid:
            return str(ConfigError(key, value[1], " or ".join(valid)))
    return " ".join(message.split())


def class_names(key: str) -> list[str]:
    """Short names of the classes that a key accepts, e.g. ``data.partition``; empty where that is not known."""
    kind = key.rpartition(".")[2]
    if kind == "optimizer":
        return sorted(ELEMENTWISE_OPTIMIZERS)
    found: set[str] = set()
    waiting = [_PLUGINS[kind]] if kind in _PLUGINS else []
    while waiting:
        children: list[type] = waiting.pop().__subclasses__()
        waiting += children
        # Abstract, private and local classes cannot be named in a configuration.
        named = [c for c in children if not inspect.isabstract(c) and "." not in c.__qualname__]
        found |= {c.__name__ for c in named if not c.__name__.startswith("_")}
    return sorted(found)


def _unknown_option(message: str) -> str | None:
    pattern = r"Option '([\w.]+)' is not accepted|does not accept option '([\w.]+)'|unrecognized arguments: --([\w.]+)"
    found = re.search(pattern, message)
    if found is None:
        return None
    group = re.search(r"Group '([\w.]+)'", message)
    name = next(part for part in found.groups() if part)
    return f"{group[1]}.{name}" if group else name


def _no_option(name: str, options: list[str]) -> str:
    """Name the options that look like it, else those of the same group, else the groups."""
    group = name.rpartition(".")[0]
    valid = (
        get_close_matches(name, options)
        or [option for option in options if group and option.startswith(f"{group}.")]
        or sorted({option.partition(".")[0] for option in options} - {"help", "print_config"})
    )
    return f"{name} is no option; valid: {', '.join(valid)}"
