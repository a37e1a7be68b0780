"""One process at a time works in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TextIO

LOCK = ".fit-lock"

_held: dict[Path, TextIO] = {}


def take(folder: Path) -> bool:
    """Keep other processes from fitting in a folder until :func:`release`, or until this process ends in any way.

    Args:
        folder: an existing folder.

    Returns:
        Whether no other process is at work there. True as well on file systems that know no locks.
    """
    place = folder.resolve()
    if place in _held:
        return True
    while True:
        file = (place / LOCK).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        if _is_at(place / LOCK, file):
            _held[place] = file
            return True
        file.close()  # whoever held it has deleted it since it was opened


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def release(folder: Path | None = None) -> None:
    """Let others in again.

    Args:
        folder: one that this process holds (nothing happens if it does not); None: all of them.
    """
    for place in list(_held) if folder is None else [folder.resolve()]:
        file = _held.pop(place, None)
        if file is not None:
            (place / LOCK).unlink(missing_ok=True)
            file.close()
