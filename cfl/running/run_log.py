"""Reads the log of a run: its last lines, and whether NaN or infinity ended the run."""

from __future__ import annotations

import re
from pathlib import Path

from cfl.runtime.run_files import SUMMARY

LOG = "log.txt"
LAST_LINES = 6
"""Lines of a failed run's log that are repeated."""

_DIVERGED = re.compile("(trained to|has|diverged to) NaN or infinity|every client was skipped")
"""Matches the last messages of a run that was ended by NaN or infinity."""


def last_lines(path: Path) -> str:
    """The last lines of a log that say anything, indented."""
    try:
        lines = [line.rstrip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def has_diverged(folder: Path) -> bool:
    """Whether a run is not finished because NaN or infinity ended it, according to its log."""
    return not (folder / SUMMARY).exists() and _DIVERGED.search(last_lines(folder / LOG)) is not None
