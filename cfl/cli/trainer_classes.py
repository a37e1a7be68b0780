"""Reports which class of Lightning could not be built for the Trainer, such as a logger or callback, and why."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from traceback import walk_tb
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

import cfl
from cfl.cli.class_entries import class_entries
from cfl.cli.reasons import causes, disk_error, reason_for_user
from cfl.runtime.class_paths import named_class
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line

_OTHERS = ("lightning", "pytorch_lightning", "torch")
"""Packages whose classes fail because of options. For other classes the trace is shown, because it helps the author."""
_OWN = str(Path(cfl.__file__).parent)
_NO_REASON = "- |Expected a |Not a valid |Does not |Problem with |Subtypes: |Errors:"
_REASON = re.compile(rf"^\s*(?:- )?(?!{_NO_REASON})(\S.*)$", re.M)
"""A line that gives the reason, in the parser's message about the types that an option may have."""


@contextmanager
def naming_what_fails(trainer: Any) -> Iterator[None]:
    """Within the context, an error names the class of Lightning or torch that cannot be built.

    Args:
        trainer: the parsed section ``trainer``, or a part of it.

    Raises:
        ConfigError: a class cannot be built. The error has the reason; if a logger's package is missing, also the way
            to install it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(reason_for_user(error), MisconfigurationException | None) and disk_error(error) is None:
            for cause, (key, one) in product(reversed(list(causes(error))), _classes(trainer)):
                if reason := _reason(cause, one):
                    valid = f"{_what_is_needed(cause)} ({on_one_line(reason)})"
                    raise ConfigError(key, one.__name__, valid) from error
        raise


def _what_is_needed(cause: BaseException) -> str:
    if isinstance(cause, ModuleNotFoundError):
        return "a class whose package is installed"
    return "settings that it accepts" if isinstance(cause, MisconfigurationException) else "options that it accepts"


def _classes(trainer: Any) -> Iterator[tuple[str, type]]:
    """Keys and classes of Lightning and torch in the Trainer's section, inner classes first."""
    for key, entry in reversed(list(class_entries(trainer, "trainer"))):
        found = named_class(entry["class_path"])
        if found is not None and found.__module__.partition(".")[0] in _OTHERS:
            yield key, found


def _reason(cause: BaseException, one: type) -> str | None:
    """The reason why a class could not be built, or None if the error is about something else."""
    text = str(cause)
    if "Does not validate against any of the Union" in text:
        errors = text.partition("Errors:\n")[2].partition("\nGiven value type:")[0]
        path = re.search(r"class_path='([\w.]+)'", text.rpartition("Given value: ")[2])
        if path is None or named_class(path[1]) is not one:
            return None
        reasons = _REASON.findall(errors)
        return str(reasons[0]) if reasons else None
    frames = [frame for frame, _ in walk_tb(cause.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames]
    inherited = any(type(frame.f_locals.get("self")) is one for frame in frames)  # a method from another class's file
    if not (inherited or inspect.getfile(one) in files):
        return None
    if files[-1].startswith(_OWN):  # what the class calls may be at fault, not it
        return None
    return text or type(cause).__name__
