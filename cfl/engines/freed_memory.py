"""Keeps memory that a step frees in the process for the next step.

glibc gives large freed blocks back to the system and fetches them again a moment later, page by page: a local step of a
small convolutional network then spends a third of its time on a thousand page faults.
"""

from __future__ import annotations

import ctypes
import os

_SETTINGS = {"M_TRIM_THRESHOLD": (-1, 2**29), "M_MMAP_THRESHOLD": (-3, 2**25)}
"""glibc's names, their numbers in ``malloc.h``, and values in bytes. Blocks of up to 32 MiB, the most that glibc
allows, come from the heap. Of free memory at the heap's end, up to 512 MiB stay with the process. Free memory below a
block in use stays in any case."""

_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the whole process; repeated calls change nothing.

    Returns:
        Whether the settings were made. They are not made for a C library other than glibc, or if the environment has
        settings of its own (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_MMAP_MAX_``,
        ``GLIBC_TUNABLES``).
    """
    if any(name in os.environ for name in _OF_THE_USER):
        return False
    try:
        library = ctypes.CDLL("libc.so.6")
        library.gnu_get_libc_version  # noqa: B018  what has it is glibc
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    answers = [mallopt(number, value) for number, value in _SETTINGS.values()]
    return answers == [1, 1]
