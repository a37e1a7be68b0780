"""Adds to an error what was being done, and in which round."""

from __future__ import annotations

from collections.abc import Callable

from cfl.runtime.distributed import ProcessFailed
from cfl.runtime.errors import FOR_USERS


class ErrorContext:
    """Within the context, errors are raised again with a message that says where they happened.

    A StopIteration, for example, would otherwise end the fit silently. ``contextlib.contextmanager`` is not used,
    because it passes a StopIteration on. Errors whose message already says where they happened pass unchanged.

    Args:
        where: returns the message, such as ``closing the round failed in round 3 (task 1)``; called on an error only.

    Raises:
        RuntimeError: with this message, and the original error as its cause.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, (*FOR_USERS, ProcessFailed)):
            raise RuntimeError(f"{self._where()}: {type(error).__name__}: {error}") from error
