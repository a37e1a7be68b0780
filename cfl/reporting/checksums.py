"""SHA-256 of a finished run's tables, configuration and summary, to detect later changes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cfl.reporting.csv_file import RunFolderError, open_file
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.run_files import CHECKSUMS

_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def write_checksums(folder: Path, names: Iterable[str], texts: Mapping[str, str]) -> None:
    """Write a file that ``sha256sum --check`` reads as well.

    Args:
        folder: the run folder.
        names: names of files in the folder.
        texts: name -> content, for files that are not written yet.
    """
    contents = {name: (folder / name).read_bytes() for name in names} | {n: text.encode() for n, text in texts.items()}
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(contents.items())]
    write_whole(folder / CHECKSUMS, "".join(lines))


def check_unchanged(folder: Path, name: str) -> None:
    """Compare a file of a run, or all files in a subfolder, with the checksums that the run has written.

    A run folder without a file of checksums (from an older version) is not checked.

    Raises:
        RunFolderError: a file has changed or is missing, or the file of checksums is damaged.
    """
    if not (folder / CHECKSUMS).exists():
        return
    with open_file(folder / CHECKSUMS) as file:
        try:
            lines = file.read().splitlines()
        except UnicodeDecodeError as error:
            raise RunFolderError(f"{folder / CHECKSUMS}: no text: {error}") from None
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise RunFolderError(f"{folder / CHECKSUMS}, line {number}: no SHA-256 with the name of a file")
        digest, of = found.groups()
        if of == name or of.startswith(f"{name}/"):
            with open_file(folder / of):  # its error says why a file cannot be read
                content = (folder / of).read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise RunFolderError(f"{folder / of}: changed since the run ended, it has another SHA-256 than then")
