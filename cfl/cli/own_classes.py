"""Checks classes and options that the parser does not check, and reports errors while classes are built."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.loggers import Logger

from cfl.cli.class_entries import class_entries
from cfl.cli.given import Given
from cfl.cli.linked_defaults import NAMED
from cfl.cli.reasons import causes, debugging, disk_error, reason_for_user
from cfl.cli.refusals import another_name, without_type
from cfl.methods import Method
from cfl.runtime.class_paths import PACKAGE, named_class
from cfl.runtime.errors import ConfigError


def check_untyped(config: Mapping[str, Any]) -> None:
    """Refuse options that have neither a type nor a default nor a given value. The parser would set them to null.

    Args:
        config: a configuration's plain values, whose classes have been imported.

    Raises:
        ConfigError: a class has such an option. The error names the key of the class.
    """
    for key, entry in class_entries(config):
        path, options = entry["class_path"], entry.get("init_args") or {}
        for one in _parameters(named_class(path)):
            bare = one.annotation is one.empty and one.default is one.empty
            if bare and one.name in options and options[one.name] is None:
                raise ConfigError(key, path, without_type(path.rpartition(".")[2], one.name))


def check_options(config: Mapping[str, Any]) -> None:
    """Refuse options below ``dict_kwargs`` that their class does not have, and a method that is only the base class.

    The parser would pass on the former to the class, and take the latter where an entry of ``methods`` is empty.
    Lightning's loggers hand their ``**kwargs`` on to another package only when they first log. They are refused if the
    parser has found what that package takes; of other classes with ``**kwargs`` it may have found a part.

    Args:
        config: a configuration's plain values, whose classes have been imported.

    Raises:
        ConfigError: an option or a method is refused.
    """
    for key, entry in class_entries(config):
        path = entry["class_path"]
        found = named_class(path)
        taken = [one.kind for one in _parameters(found)]
        for option, value in (entry.get("dict_kwargs") or {}).items():
            if path.startswith(f"{PACKAGE}.") or inspect.Parameter.VAR_KEYWORD not in taken:
                raise ConfigError(f"{key}.{option}", value, f"unset: it is no option of {path.rpartition('.')[2]}")
            if known := _options_of_logger(found):
                valid = f"unset: {path.rpartition('.')[2]} has the options {', '.join(known)}"
                raise ConfigError(f"{key}.{option}", value, valid)
        if found is Method:
            raise ConfigError(key, "Method", f"{NAMED['methods']}; the base class does nothing")


def check_methods_names(config: Mapping[str, Any], given: Sequence[Given]) -> None:
    """Refuse a method's class that has the short name by which another method's class is given.

    The parser refuses it only where the class comes before the short name, which is then ambiguous.

    Args:
        config: a configuration's plain values.
        given: the options that were given to the parser.

    Raises:
        ConfigError: there is such a class.
    """
    said = {one.key: one.value for one in given}
    paths = {f"methods.{name}": entry["class_path"] for name, entry in config["methods"].items()}
    for key, path in paths.items():
        short = path.rpartition(".")[2]
        if other := next((one for at, one in paths.items() if said.get(at) == short and one != path), None):
            raise ConfigError(key, path, another_name(short, [other, path]))


@contextmanager
def naming_what_cannot_be_made(config: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, an error in a class's own code is reported with the class's key.

    Args:
        config: a configuration's plain values, whose classes have been imported.

    Raises:
        ConfigError: building a class failed. The error names the key of a class in the file that raised it, or that
            called what raised it if the class is not of this package.
    """
    try:
        yield
    except Exception as error:
        *_, first = causes(error)
        frames = traceback.extract_tb(first.__traceback__)
        if reason_for_user(error) or disk_error(error) or debugging() or not frames:
            raise
        entries = [(key, entry["class_path"], _file_of(entry["class_path"])) for key, entry in class_entries(config)]
        for frame in reversed(frames):
            for key, path, file in entries:
                may_call = frame is frames[-1] or not path.startswith(f"{PACKAGE}.")
                if file == Path(frame.filename) and may_call:
                    what = f"{type(first).__name__}: {first} ({file.name}, line {frame.lineno})"
                    raise ConfigError(key, path, f"options with which it can be made; {what}") from error
        raise


def _file_of(path: str) -> Path | None:
    """The file of an imported class."""
    module = sys.modules.get(getattr(named_class(path), "__module__", ""))
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _options_of_logger(kind: Any) -> list[str]:
    """All options of a logger of Lightning's, with those of its ``**kwargs``; empty if these cannot be found."""
    if not (isinstance(kind, type) and issubclass(kind, Logger) and kind.__module__.startswith("lightning.")):
        return []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    options = sorted(action.dest for action in parser._actions if not action.dest.endswith("help"))
    return options if set(options) - {one.name for one in _parameters(kind)} else []


def _parameters(kind: object) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(kind).parameters.values()) if isinstance(kind, type) else []
    except ValueError:  # a class that is not written in Python
        return []
