"""Writes files so that readers never see a part, the last of several writers wins, and errors name file and disk.

A file is written under a temporary name in the same folder, and then renamed. The writer holds a lock on it, which ends
with the process. The next process that writes into the folder can therefore tell which temporary files are abandoned,
and removes them.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Literal

from cfl.runtime.disk import writing
from cfl.runtime.file_lock import is_at, lock
from cfl.runtime.regular_file import open_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_TEMPORARY = re.compile(r"\.cfl-[0-9a-f]{8}-.+")
TEMPORARY = ".cfl-*-*"
"""Pattern of the temporary files' names."""
_tidied: set[Path] = set()
"""Folders in which this process has looked for abandoned temporary files."""
_log = logging.getLogger(__name__)


class OutputFile(io.FileIO):
    """A file to write. :meth:`write` writes all of its data, or raises an error.

    Libraries get no descriptor, because they would write without :meth:`write`. The error of a write is kept, because
    some libraries wrap it.

    Args:
        path: as for ``open``.
        mode: ``wb`` empties an existing file, ``xb`` refuses it, ``ab`` adds to its end.

    Attributes:
        path: as given.
        descriptor: of the open file.
        failure: the error of the first write that failed, after which nothing more is written; None before.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, mode: Literal["wb", "xb", "ab"] = "wb") -> None:
        super().__init__(path, mode)
        self.path, self.descriptor = path, super().fileno()
        self.failure: OSError | None = None

    def fileno(self) -> int:
        """Refuse to give the descriptor, see the class."""
        raise io.UnsupportedOperation("fileno")

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of the data.

        Raises:
            OSError: the data cannot be written, or an earlier write has failed.
        """
        if self.failure is not None:
            raise self.failure
        with memoryview(data) as given, given.cast("B") as left:
            try:
                write_all(self.descriptor, left)
            except OSError as error:
                self.failure = error
                raise
            return len(left)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write bytes to an open file, in as many pieces as the system needs.

    Raises:
        OSError: they cannot be written.
    """
    done = 0
    while done < len(data):
        written = os.write(descriptor, data[done:])
        if not written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += written


@contextmanager
def replacing(path: Path, needed: int | None = None, sync: bool = False) -> Iterator[OutputFile]:
    """A new file that replaces ``path`` at the end of the context; an error within it leaves ``path`` as it was.

    A device or a link below ``/dev``, such as ``/dev/stdout``, is not replaced but written to.

    Args:
        path: the file to replace, which need not exist; its folder must.
        needed: bytes that it needs, for the message of an error.
        sync: whether the file must survive a loss of power from then on.

    Raises:
        NotWritten: it cannot be written.
    """
    path = Path(path)
    with writing(path, needed), OutputFile(path, "ab") if is_stream(path) else _renamed(path, sync) as file:
        try:
            yield file
        except BaseException:
            if file.failure is not None:  # a library may have wrapped this error
                raise file.failure from None
            raise
        if file.failure is not None:
            raise file.failure


def is_stream(path: Path) -> bool:
    """Whether a path is a device, a pipe or a link below ``/dev``, which a file must not replace.

    Pipes in other folders are replaced: in the folder of a foreign run they would be waited for without end. One of
    these folders is ``/dev/shm``, which is in memory.
    """
    parts = path.absolute().parts
    if parts[:2] != ("/", "dev") or parts[2:3] == ("shm",) or not path.exists() or path.is_dir():
        return False
    return path.is_symlink() or not path.is_file()


@contextmanager
def _renamed(path: Path, sync: bool) -> Iterator[OutputFile]:
    _tidy(path.parent)
    file = _new_beside(path)
    try:
        yield file
        if sync:
            os.fsync(file.descriptor)
        file.path.replace(path)
        if sync:
            _sync_folder(path.parent)
    except BaseException:
        file.path.unlink(missing_ok=True)  # a part of a file would keep a full disk full
        raise
    finally:
        file.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file as UTF-8. An existing file stays unchanged if writing fails.

    Raises:
        NotWritten: it cannot be written.
    """
    data = text.encode()
    with replacing(path, len(data)) as file:
        file.write(data)


def append(path: Path, text: str) -> None:
    """Add text to the end of a file as UTF-8, all of it or nothing.

    Raises:
        NotWritten: it cannot be written.
    """
    data = text.encode()
    with writing(path, len(data)):
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
        try:
            before = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, memoryview(data))
            except BaseException:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


@contextmanager
def if_possible() -> Iterator[None]:
    """Within the context, log an error of writing as a warning: no run ends because, e.g., a picture is missing."""
    try:
        yield
    except OSError as error:
        _log.warning("%s", error)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, where its file system does so."""
    with suppress(OSError):  # the file is in its place already
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _new_beside(path: Path) -> OutputFile:
    """A locked new file with a temporary name, in the same folder and with the same suffix."""
    while True:
        file = OutputFile(path.with_name(f".cfl-{token_hex(4)}-{path.name}"), "xb")
        held = lock(file.descriptor)
        if held is None or (held and is_at(file.path, file.descriptor)):
            return file
        file.close()  # before it was locked, another process took it for an abandoned file


def _tidy(folder: Path) -> None:
    """Remove temporary files of processes that have ended, at this process's first write into a folder."""
    place = folder.absolute()
    if place in _tidied:
        return
    _tidied.add(place)
    for path in place.glob(TEMPORARY):
        if not _TEMPORARY.fullmatch(path.name):
            continue
        with suppress(OSError):  # it is not ours, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if lock(descriptor):
                    path.unlink()
            finally:
                os.close(descriptor)
