"""Finds the error in a chain of causes that is shown to the user."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightning.fabric.utilities.exceptions import MisconfigurationException

from cfl.runtime.disk import is_of_disk
from cfl.runtime.errors import FOR_USERS, NotWritten
from cfl.runtime.memory import lack_of_memory

_SAID_IN_FULL = (*FOR_USERS, MisconfigurationException)


def debugging() -> bool:
    """Whether JSONARGPARSE_DEBUG asks for traces instead of messages."""
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")


def reason_for_user(error: BaseException | None) -> BaseException | None:
    """The error in a chain of causes whose message is meant for the user, or None."""
    meant = (one if isinstance(one, _SAID_IN_FULL) else lack_of_memory(one) for one in causes(error))
    return next((one for one in meant if one), None)


def error_to_print(error: Exception) -> BaseException:
    """The error whose message a command prints instead of a trace.

    Raises:
        Exception: the given error, if it has no cause that is meant for the user; with JSONARGPARSE_DEBUG in any case.
    """
    reason = reason_for_user(error) or (error if isinstance(error, OSError) else None)
    if reason is None or debugging():
        raise error
    return reason


def disk_error(error: BaseException | None) -> OSError | None:
    """The error of a disk in a chain of causes, also one that a library has raised, or None.

    None is also returned if an error that is meant for the user comes before it in the chain.
    """
    for one in causes(error):
        if isinstance(one, NotWritten) or is_of_disk(one):
            return one if isinstance(one, OSError) else None
        if isinstance(one, _SAID_IN_FULL):
            return None
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised for, the nearest first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
