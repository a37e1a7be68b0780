"""Checks and downloads a data set's files, and says in the error message how to get missing ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cfl.data.sources.idx import check_idx_size
from cfl.data.sources.root import ENVIRONMENT_VARIABLE
from cfl.runtime.errors import DataFilesMissing, reason

_log = logging.getLogger(__name__)
_Loaded = TypeVar("_Loaded")

NETWORK_TIMEOUT = 10.0  # seconds without an answer, so that a machine without network does not wait for minutes

WHERE_ELSE = (
    "Put the files there, or point the option `data.root` or the environment variable "
    f"{ENVIRONMENT_VARIABLE} at a folder that has them."
)


def where_else(path: str) -> str:
    """Advice where to put the files of ``path``; it mentions the data root only if the path is relative to it."""
    return "Put the files there." if Path(path).expanduser().is_absolute() else WHERE_ELSE


@dataclass(frozen=True)
class DataFile:
    """One file that a data set needs.

    Attributes:
        path: where it is expected.
        md5: of the whole file, hexadecimal; None where no published sum exists.
        address: where it can be downloaded; None for a member of an archive.
        archive: the file it is unpacked from; None where it is used as downloaded.
        is_idx: whether it is an unpacked idx file, whose header tells its size.
    """

    path: Path
    md5: str | None = None
    address: str | None = None
    archive: DataFile | None = None
    is_idx: bool = False

    def damage(self) -> str | None:
        """Describe the damage of the file, or of its archive if only that exists; None if there is none."""
        if not self.path.exists():
            return self.archive.damage() if self.archive else None
        if not self.path.is_file():
            return f"{self.path} is not a file"
        if self.md5 is not None:
            with self.path.open("rb") as stream:
                md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if md5 != self.md5:
                return f"{self.path} is damaged: its md5 is {md5}, that of the published file {self.md5}"
        if self.is_idx:
            try:
                check_idx_size(self.path)
            except ValueError as error:
                return str(error)
        return None

    def how_to_get(self) -> str:
        """One line: the full path, and where the file comes from."""
        state = "present" if self.path.exists() else "missing"
        if self.archive is None:
            return f"  {self.path} ({state}): {self.address}"
        return f"  {self.path} ({state}): from {self.archive.address}, unpacked, or as {self.archive.path}"


def refuse_damaged(title: str, files: Sequence[DataFile]) -> None:
    """Refuse a file that differs from the published one; it is neither used nor overwritten.

    Raises:
        DataFilesMissing: naming every damaged file.
    """
    damages = dict.fromkeys(damage for file in files if (damage := file.damage()) is not None)
    if damages:
        text = "\n".join(f"  {damage}" for damage in damages)
        raise DataFilesMissing(
            f"{title} cannot be used:\n{text}\nDelete what is damaged; the next run downloads it, "
            f"or copy it here from a whole copy. The option `data.root` or the environment variable "
            f"{ENVIRONMENT_VARIABLE} can also name another folder."
        )


def fetch(title: str, files: Sequence[DataFile], attempt: Callable[[], _Loaded], hint: str = "") -> _Loaded:
    """Run ``attempt``, which downloads or unpacks ``files`` and reads them; partial files are removed if it fails.

    Args:
        title: name of the data set for messages.
        files: the files that the attempt provides.
        attempt: called once, with a network timeout of :data:`NETWORK_TIMEOUT` seconds.
        hint: another way to get the data, added to the error message.

    Raises:
        DataFilesMissing: naming each file, where it belongs and its address.
    """
    addresses = sorted({source.address for file in files if (source := file.archive or file).address})
    _log.info("%s: downloading or unpacking %s", title, ", ".join(addresses))
    try:
        with _no_leftovers(files), _patience(NETWORK_TIMEOUT), contextlib.redirect_stdout(io.StringIO()):
            return attempt()
    except Exception as error:  # networks, archives and disks raise exceptions of many classes
        expected = "\n".join(file.how_to_get() for file in files)
        raise DataFilesMissing(
            f"{title}: files are missing and could not be downloaded or unpacked ({reason(error)}).\n"
            f"Expected:\n{expected}\n{WHERE_ELSE}{' ' if hint else ''}{hint}"
        ) from None


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Within the context, limit the time of every network operation; the download functions have no timeout option."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _no_leftovers(files: Sequence[DataFile]) -> Iterator[None]:
    """On failure remove files that were created, except complete ones, so that the next run finds no truncated file."""
    archives = {file.archive for file in files if file.archive is not None}
    new_files = [file for file in [*files, *archives] if not file.path.exists()]
    new_folders = {folder for file in new_files for folder in file.path.parents if not folder.exists()}
    try:
        yield
    except BaseException:
        for file in new_files:
            if file.path.is_file() and file.damage() is not None:
                file.path.unlink()
        for folder in sorted(new_folders, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):  # it holds something else, or was never made
                folder.rmdir()
        raise
