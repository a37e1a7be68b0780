"""Memory that a step frees stays with the process for the next step.

glibc gives large freed blocks back to the system and fetches them again a moment later, page by page: a local step of a
small convolutional network then spends a third of its time on a thousand page faults.
"""

from __future__ import annotations

import ctypes
import os

_SETTINGS = {"M_TRIM_THRESHOLD": (-1, 2**29), "M_MMAP_THRESHOLD": (-3, 2**25)}
"""glibc's names, their numbers in ``malloc.h``, values in bytes: blocks of up to 32 MiB, the largest for which glibc
allows it, come from a heap, of which up to 512 MiB at its end stay when they are free. Free memory below a block that
is in use stays in any case."""

_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory, for the whole process; repeated calls change nothing.

    Returns:
        Whether it was told: not with a C library other than glibc, nor where the environment says how memory is to be
        handled (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_MMAP_MAX_``, ``GLIBC_TUNABLES``).
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
