"""Locks on run folders, so that one process at a time works in each."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from cfl.runtime.file_lock import is_at, lock
from cfl.runtime.regular_file import open_regular

LOCK = ".fit-lock"

_held: dict[Path, tuple[TextIO, bool]] = {}
"""Folder -> its lock file, and whether this process made the folder."""


def take(folder: Path, made: bool = False) -> bool:
    """Keep other processes from fitting in a folder until :func:`release`, or until this process ends in any way.

    Args:
        folder: an existing folder.
        made: whether this process has just made the folder; :func:`release` then removes it if it is empty.

    Returns:
        False if another process holds the folder. True on file systems without locks.

    Raises:
        OSError: the lock file cannot be opened.
    """
    place = folder.resolve()
    if place in _held:
        return True
    while True:
        file = os.fdopen(open_regular(place / LOCK, os.O_WRONLY), "w")
        held = lock(file.fileno())
        if not held:
            file.close()
            return held is None
        if is_at(place / LOCK, file.fileno()):
            _held[place] = file, made
            return True
        file.close()  # the holder deleted the lock file after it was opened here


def release(folder: Path | None = None) -> None:
    """Allow other processes to use a folder again, and remove it if this process made it and it is empty.

    Args:
        folder: a folder that this process holds (otherwise nothing happens); None releases all of them.
    """
    for place in list(_held) if folder is None else [folder.resolve()]:
        if place in _held:
            file, made = _held.pop(place)
            (place / LOCK).unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # something is in it
                    place.rmdir()
            file.close()
