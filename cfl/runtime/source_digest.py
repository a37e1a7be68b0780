"""Which revision of the program's own code this is, told without git."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

DIGITS = 12


@cache
def source_digest() -> str:
    """Hex digits that every ``*.py`` file of the package ``cfl`` decides, in content and path.

    Read once per process, at the first call: a file that is changed while a run goes on is not the code that it runs.
    """
    return digest_of([_package("cfl")])


def digest_of(packages: Sequence[Path]) -> str:
    """The digest of some packages' files, wherever the packages lie.

    Args:
        packages: their folders; paths count from the folder that holds each.
    """
    files = {path.relative_to(folder.parent).as_posix(): path for folder in packages for path in source_files(folder)}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def source_files(folder: Path) -> Iterator[Path]:
    """Every ``*.py`` file below a folder, in folders that are links, too: ``cfl/callbacks`` is one in a checkout."""
    for place, _, names in os.walk(folder, followlinks=True):
        yield from (Path(place) / name for name in names if name.endswith(".py"))


def _package(name: str) -> Path:
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
