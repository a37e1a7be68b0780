"""Memory of the calling process, and of all that it has started."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def memory() -> dict[str, float]:
    """``peak_rss_mb``, the highest resident memory so far, and ``rss_mb``, that of now, in MB of 10^6 bytes.

    Linux's ``ru_maxrss`` includes the memory of the parent process at the moment when it started this one. It is
    therefore read only where ``/proc`` does not exist; ``rss_mb`` is then the peak, too.
    """
    status = _status("self")
    if status:
        peak, now = (1024 * int(status[key].split()[0]) for key in ("VmHWM", "VmRSS"))
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = now = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_rss_mb": peak / 1e6, "rss_mb": now / 1e6}


def memory_of_tree() -> dict[str, float]:
    """The same, summed over this process and :func:`descendants`. A page that several of them share counts in each."""
    counted = [status for status in map(_status, ["self", *map(str, descendants())]) if "VmHWM" in status]
    if not counted:
        return memory()
    peak, now = (sum(1024 * int(status[key].split()[0]) for status in counted) for key in ("VmHWM", "VmRSS"))
    return {"peak_rss_mb": peak / 1e6, "rss_mb": now / 1e6}


def descendants() -> set[int]:
    """The processes that this one has started, directly or not, and that still run; empty without ``/proc``."""
    parents = {int(place.name): int(_status(place.name).get("PPid", 0)) for place in Path("/proc").glob("[0-9]*")}
    tree = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree - {os.getpid()}


def _status(process: str) -> dict[str, str]:
    """What ``/proc`` says of a process; empty if it has ended, or if there is no ``/proc``."""
    try:
        lines = Path("/proc", process, "status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line)
