"""What of a chain of errors is said to the user."""

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


def told(error: Exception) -> BaseException:
    """What a command says in the place of an error's trace.

    Raises:
        Exception: the error, if it is not meant for the user; with JSONARGPARSE_DEBUG in any case.
    """
    reason = reason_for_user(error) or (error if isinstance(error, OSError) else None)
    if reason is None or debugging():
        raise error
    return reason


def disk_error(error: BaseException | None) -> OSError | None:
    """The error in a chain of causes that a disk made, also one that a library has met, or None.

    An error whose message is meant for the user comes before its causes.
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
