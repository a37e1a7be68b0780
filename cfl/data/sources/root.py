"""Finds the folder of all data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from cfl.runtime.errors import ConfigError

ENVIRONMENT_VARIABLE = "CFL_DATA_ROOT"
_given: ContextVar[str | None] = ContextVar("data.root", default=None)


@contextmanager
def data_root_given(option: str | None) -> Iterator[None]:
    """Within the context, sources that open files while they are built look for them under ``data.root``."""
    token = _given.set(option)
    try:
        yield
    finally:
        _given.reset(token)


def data_root(option: str | None = None) -> Path:
    """The folder that holds every data set: the option, else ``$CFL_DATA_ROOT``, else ``./data``.

    The folder need not exist: sources that read no files never look at it, downloads create it.

    Args:
        option: value of ``data.root``; ``~`` is expanded. None takes that of :func:`data_root_given`, else leaves the
            choice to the environment.

    Raises:
        ConfigError: the chosen path is empty, cannot be a path, or names something that is not a folder.
    """
    option = _given.get() if option is None else option
    key = "data.root" if option is not None else ENVIRONMENT_VARIABLE
    chosen = option if option is not None else os.environ.get(ENVIRONMENT_VARIABLE) or "data"
    if not chosen:
        raise ConfigError(key, chosen, "the path of a folder, or null for the default")
    root = Path(chosen).expanduser()
    try:
        if root.exists() and not root.is_dir():
            raise ConfigError(key, chosen, "the path of a folder, this is a file")
    except OSError as error:
        raise ConfigError(key, chosen, f"the path of a folder ({error.strerror})") from None
    return root
