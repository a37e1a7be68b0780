"""Writes files atomically: a reader never sees a part of a file, and the last of several writers wins."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, as UTF-8. An existing file stays unchanged if writing fails.

    Raises:
        OSError: it cannot be written.
    """
    temporary = beside(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def beside(path: Path) -> Path:
    """A temporary name that only this process uses, in the same folder and with the same suffix."""
    return path.with_name(f".{os.getpid()}-{path.name}")
