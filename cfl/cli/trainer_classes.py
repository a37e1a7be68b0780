"""Says which of Lightning's classes could not be built, and why: loggers, callbacks and others of the Trainer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import cfl
from cfl.cli.class_entries import class_entries
from cfl.cli.reasons import causes, disk_error, reason_for_user
from cfl.runtime.class_paths import named_class
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import on_one_line

_OTHERS = ("lightning", "pytorch_lightning", "torch")
"""Packages whose classes' errors are about options; the author of any other class wants to see the trace."""
_OWN = str(Path(cfl.__file__).parent)
_NO_REASON = "- |Expected a |Not a valid |Does not |Problem with |Subtypes: |Errors:"
_REASON = re.compile(rf"^\s*(?:- )?(?!{_NO_REASON})(\S.*)$", re.M)
"""A line of the parser's message about the types that an option may have, which says why one was refused."""


@contextmanager
def naming_what_fails(trainer: Any) -> Iterator[None]:
    """Within the context, a class of Lightning's that cannot be built is refused by name.

    Args:
        trainer: the section of that name, parsed.

    Raises:
        ConfigError: with the reason; for a logger whose package is missing, with how to install it.
    """
    try:
        yield
    except Exception as error:
        if reason_for_user(error) is None and disk_error(error) is None:
            found = list(_classes(trainer))
            for cause in reversed(list(causes(error))):
                for key, one in found:
                    if reason := _reason(cause, one):
                        what = "a logger whose package is installed" if _lacks(cause) else "options that it accepts"
                        raise ConfigError(key, one.__name__, f"{what} ({on_one_line(reason)})") from error
        raise


def _lacks(cause: BaseException) -> bool:
    return isinstance(cause, ModuleNotFoundError)


def _classes(trainer: Any) -> Iterator[tuple[str, type]]:
    """Keys and classes of other packages in the Trainer's section, the inner ones first."""
    for key, entry in reversed(list(class_entries(trainer, "trainer"))):
        found = named_class(entry["class_path"])
        if found is not None and found.__module__.partition(".")[0] in _OTHERS:
            yield key, found


def _reason(cause: BaseException, one: type) -> str | None:
    """Why the class could not be built, if that is what an error is about."""
    text = str(cause)
    if "Does not validate against any of the Union" in text:
        errors = text.partition("Errors:\n")[2].partition("\nGiven value type:")[0]
        path = re.search(r"class_path='([\w.]+)'", text.rpartition("Given value: ")[2])
        if path is None or named_class(path[1]) is not one:
            return None
        reasons = _REASON.findall(errors)
        return str(reasons[0]) if reasons else None
    files = [frame.filename for frame in extract_tb(cause.__traceback__)]
    if inspect.getfile(one) not in files or files[-1].startswith(_OWN):  # what the class calls may be at fault, not it
        return None
    return text or type(cause).__name__
