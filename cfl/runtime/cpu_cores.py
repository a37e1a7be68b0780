"""Which CPU cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> set[int]:
    """Numbers of the cores that this process may use; where the system does not tell, as macOS, all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
