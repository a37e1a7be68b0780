"""Adds to an error what was being done, in which round, and the place in code of the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from cfl.runtime.distributed import ProcessFailed
from cfl.runtime.errors import FOR_USERS

_NOT_THE_USERS = {"cfl", "torch", "torchmetrics", "torchvision", "lightning", "numpy", *sys.stdlib_module_names}
"""Packages whose code is not the user's."""


class ErrorContext:
    """Within the context, errors are raised again with a message that says where they happened.

    A StopIteration, for example, would otherwise end the fit silently. ``contextlib.contextmanager`` is not used,
    because it passes a StopIteration on. If code of the user's raised the error, the message ends with the place.
    Errors whose message already says where they happened pass unchanged.

    Args:
        where: returns the message, such as ``closing the round failed in round 3 (task 1)``; called on an error only.

    Raises:
        RuntimeError: with this message, and the original error as its cause.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, (*FOR_USERS, ProcessFailed)):
            raise RuntimeError(f"{self._where()}: {type(error).__name__}: {error}{_users_place(trace)}") from error


def _users_place(trace: TracebackType | None) -> str:
    """The innermost place of a traceback that is in the user's code, such as a method's; empty if there is none."""
    places = [(frame.f_code, line) for frame, line in walk_tb(trace) if _is_users(frame.f_globals.get("__name__"))]
    if not places:
        return ""
    code, line = places[-1]
    return f" ({Path(code.co_filename).name}, line {line}, in {code.co_name})"


def _is_users(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _NOT_THE_USERS
