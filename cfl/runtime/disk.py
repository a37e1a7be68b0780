"""Says in one sentence why a file could not be written: its disk, and how much space is free and needed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from cfl.runtime.errors import NotWritten

_REASONS = {
    errno.ENOSPC: "no space is left on the disk at {mount}",
    errno.EDQUOT: "the disk quota at {mount} is used up",
    errno.EROFS: "the file system at {mount} is read-only",
    errno.EIO: "the disk at {mount} fails",
    errno.EFBIG: "the file is larger than the process (ulimit -f) or the file system at {mount} allows",
}
"""Errors that come from the disk and not from the file, with their messages."""


@contextmanager
def writing(path: Path, needed: int | None = None, name: str | None = None) -> Iterator[None]:
    """Within the context, an operating system's error is raised as one that names the file.

    Args:
        path: the file that is written, or the folder of one that has no name.
        needed: bytes that it needs; None if that is not known.
        name: what the file is called in the message; None for the path.

    Raises:
        NotWritten: in place of any other OSError.
    """
    try:
        yield
    except OSError as error:
        raise not_written(path, error, needed, name) from error


def not_written(path: Path, error: OSError, needed: int | None = None, name: str | None = None) -> NotWritten:
    """The error to raise if a file could not be written; arguments as for :func:`writing`.

    Where the error is a NotWritten, the new one has its reason and the size in it, with the given path or name.
    """
    cause = error
    while isinstance(cause, NotWritten) and isinstance(cause.__cause__, OSError):
        needed = needed or cause.needed
        cause = cause.__cause__
    raised = NotWritten(f"{name or path} cannot be written: {why(path, cause, needed)}")
    raised.needed = needed
    return raised


def is_of_disk(error: BaseException) -> bool:
    """Whether an error comes from the disk itself, for example because it is full."""
    return isinstance(error, OSError) and error.errno in _REASONS


def why(path: Path, error: OSError, needed: int | None = None) -> str:
    """The reason of an error in words; for a full disk, with the space that is free and needed.

    Args:
        path: the file or folder in question; it need not exist.
        error: what the operating system says.
        needed: bytes that are needed; None if unknown.
    """
    place = existing(path)
    if error.errno not in _REASONS:
        return (error.strerror or str(error)).lower()
    reason = _REASONS[error.errno].format(mount=mount_of(place))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += f" ({_space(place, needed)})"
    return reason


def existing(path: Path) -> Path:
    """The path itself, or the first folder above it that exists."""
    path = path.absolute()
    while not os.path.exists(path) and path != path.parent:  # Path.exists raises an error for names that are too long
        path = path.parent
    return path


def mount_of(path: Path) -> Path:
    """Where the disk of an existing file is mounted."""
    path = path.resolve()
    while not os.path.ismount(path) and path != path.parent:
        path = path.parent
    return path


def _space(place: Path, needed: int | None) -> str:
    try:
        disk = os.statvfs(place)
    except OSError:
        return "how much is free is not known"
    free = f"{decimal(disk.f_bavail * disk.f_frsize)} free"
    if disk.f_files and not disk.f_favail:
        free = f"no file more can be made, {free}"
    return f"{free}, {decimal(needed)} needed" if needed else free
