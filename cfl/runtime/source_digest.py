"""Identifies the revision of the program's code without git."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

DIGITS = 12


@cache
def source_digest() -> str:
    """A digest, in hexadecimal digits, of the content and paths of all ``*.py`` files of the package ``cfl``.

    Files are read once per process, at the first call, because files changed later are not the code that runs.
    """
    return digest_of([Path(__file__).parents[1]])


def digest_of(packages: Sequence[Path]) -> str:
    """The digest of the files of some packages, wherever the packages are installed.

    Args:
        packages: folders of the packages; paths are relative to the folder that holds each.
    """
    files = {path.relative_to(folder.parent).as_posix(): path for folder in packages for path in source_files(folder)}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def source_files(folder: Path) -> Iterator[Path]:
    """Every ``*.py`` file below a folder, also in folders that are links, such as ``cfl/callbacks`` in a checkout."""
    for place, _, names in os.walk(folder, followlinks=True):
        yield from (Path(place) / name for name in names if name.endswith(".py"))
