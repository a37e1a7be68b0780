"""Errors that say what was being done, and in which round."""

from __future__ import annotations

from collections.abc import Callable

from cfl.runtime.distributed import ProcessFailed
from cfl.runtime.errors import BadUpdate, ConfigError


class ErrorContext:
    """Within the context, say where a failure happened; a StopIteration, say, would end the fit without a word.

    Not a ``contextlib.contextmanager``, which hands a StopIteration on as it came. Errors whose message already says
    where they come from pass unchanged.

    Args:
        where: says what failed and when, as in ``closing the round failed in round 3 (task 1)``; asked only then.

    Raises:
        RuntimeError: with these words, and the failure as its cause.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, BadUpdate | ConfigError | ProcessFailed):
            raise RuntimeError(f"{self._where()}: {type(error).__name__}: {error}") from error
