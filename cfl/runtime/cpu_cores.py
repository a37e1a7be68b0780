"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use; all cores if the system does not say, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
