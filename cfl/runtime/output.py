"""Makes errors of standard output name its file, for example if the disk is full or the reader has ended."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cfl.runtime.disk import not_written


class _Output(io.TextIOWrapper):
    """Text output that raises a :class:`cfl.runtime.errors.NotWritten` once, and writes nothing from then on."""

    def write(self, text: str, /) -> int:
        """See the base class."""
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        """See the base class."""
        with self._named():
            super().flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file = Path(f"/proc/self/fd/{self.fileno()}").resolve()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise not_written(file, error, name="standard output") from error


def name_output() -> None:
    """Replace ``sys.stdout``, so that its errors name standard output."""
    output = sys.stdout
    if type(output) is io.TextIOWrapper:
        options = (output.encoding, output.errors, None, output.line_buffering)
        sys.stdout = _Output(output.detach(), *options)
