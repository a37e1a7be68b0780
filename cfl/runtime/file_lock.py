"""Locks on files, which end with the process that holds them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Lock an open file or folder for this process.

    Args:
        descriptor: of the file.
        wait: wait while another process holds the lock.

    Returns:
        True if it is locked now, False if another process holds the lock, None on file systems without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this path; another process may have deleted it since it was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
