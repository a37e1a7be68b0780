"""Memory of the calling process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def memory() -> dict[str, float]:
    """``peak_rss_mb``, the highest resident memory so far, and ``rss_mb``, that of now, in MB of 10^6 bytes.

    Linux's ``ru_maxrss`` includes the memory of the parent process at the moment when it started this one. It is
    therefore read only where ``/proc`` does not exist; ``rss_mb`` is then the peak, too.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        peak, now = (1024 * int(lines[key].split()[0]) for key in ("VmHWM", "VmRSS"))
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = now = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_rss_mb": peak / 1e6, "rss_mb": now / 1e6}
