"""One process at a time works in a run folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TextIO

from cfl.runtime.file_lock import is_at, lock

LOCK = ".fit-lock"

_held: dict[Path, TextIO] = {}
_made: set[Path] = set()


def take(folder: Path, made: bool = False) -> bool:
    """Keep other processes from fitting in a folder until :func:`release`, or until this process ends in any way.

    Args:
        folder: an existing folder.
        made: whether this process has just made it, so that it is removed if nothing is in it in the end.

    Returns:
        Whether no other process is at work there. True as well on file systems that know no locks.
    """
    place = folder.resolve()
    if place in _held:
        return True
    while True:
        file = (place / LOCK).open("w")
        held = lock(file.fileno())
        if not held:
            file.close()
            return held is None
        if is_at(place / LOCK, file.fileno()):
            _held[place] = file
            if made:
                _made.add(place)
            return True
        file.close()  # whoever held it has deleted it since it was opened


def release(folder: Path | None = None) -> None:
    """Let others in again; a folder that was made for a run which left nothing in it is removed.

    Args:
        folder: one that this process holds (nothing happens if it does not); None: all of them.
    """
    for place in list(_held) if folder is None else [folder.resolve()]:
        file = _held.pop(place, None)
        if file is not None:
            (place / LOCK).unlink(missing_ok=True)
            if place in _made:
                with suppress(OSError):  # something is in it
                    place.rmdir()
            _made.discard(place)
            file.close()
