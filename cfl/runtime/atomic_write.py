"""Files that are written in one step: of two processes one has the last word, and nobody reads a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, as UTF-8. One that is there already stays as it is if the new one cannot be written.

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
    """A name of this process's own in the same folder, with the same suffix."""
    return path.with_name(f".{os.getpid()}-{path.name}")
