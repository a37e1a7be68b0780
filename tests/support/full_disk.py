"""A simulated disk that is full or fails, for what the test's own process writes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

_write = os.write


class FullDisk(AbstractContextManager["FullDisk"]):
    """Within the context, writing fails after ``files`` files; the first half of the first failing write is written.

    Args:
        files: how many files are still written; each addition to a file counts as one.
        of: only files whose names end with this count; None for all.
        error: number of the error that writing raises then.

    Attributes:
        begun: how many files were begun.
    """

    def __init__(self, files: int = 0, of: str | None = None, error: int = errno.ENOSPC) -> None:
        self.files, self.of, self.error, self.begun = files, of, error, 0
        self._short, self._file = True, -1

    def write(self, descriptor: int, data: Any) -> int:
        """Replacement of ``os.write``."""
        status = os.fstat(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if not stat.S_ISREG(status.st_mode) or not (self.of is None or name.endswith(self.of)):
            return _write(descriptor, data)
        adds = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        if status.st_ino != self._file or not status.st_size or adds:
            self.begun += 1
            self._file = status.st_ino
        if self.begun > self.files:
            half = len(data) // 2
            if not self._short or not half:
                raise OSError(self.error, os.strerror(self.error))
            self._short, data = False, data[:half]
        return _write(descriptor, data)

    def __enter__(self) -> FullDisk:
        self._patch = mock.patch.object(os, "write", self.write)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
