"""Read and write CSV files of a run folder; errors name the file and the line."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cfl.runtime.printable import encodable


class RunFolderError(ValueError):
    """A run folder that cannot be read; the message is one line naming the file and what is wrong with it."""


def open_file(path: Path) -> IO[str]:
    """Open a text file of a run folder; raise :class:`RunFolderError` if that fails."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for ever
            raise RunFolderError(f"{path}: not a file")
        return Path(path).open(encoding="utf-8", newline="")
    except OSError as error:
        raise RunFolderError(f"{path}: {'no such file' if not Path(path).exists() else error.strerror}") from None


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header and the rows with their line numbers; empty lines are left out.

    Raises:
        RunFolderError: the file is missing, empty, cut off or no CSV file, or a row has more or fewer values than the
            header.
    """
    with open_file(path) as file:
        try:
            text = file.read()
            reader = csv.reader(io.StringIO(text, newline=""))
            lines = [(reader.line_num, row) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path}: not a CSV file: {error}") from None
    if not lines:
        raise RunFolderError(f"{path}: empty")
    (_, header), *rows = lines
    for line, row in rows:
        if len(row) != len(header):
            raise RunFolderError(f"{path}, line {line}: {len(row)} values instead of {len(header)}")
    if not text.endswith("\n"):
        raise RunFolderError(f"{path}, line {lines[-1][0]}: cut off, no line break ends it")
    return header, rows


def number_in(text: str, path: Path, line: int) -> float:
    """A cell's value, NaN where it is empty; path and line are for the error."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.inf
    if math.isinf(value) or (text and math.isnan(value)):
        raise RunFolderError(f"{path}, line {line}: {text!r} is neither a finite number nor empty")
    return value


def index_in(text: str, what: str, path: Path, line: int) -> int:
    """Return a cell's whole number; ``what`` (such as task or round), path and line are for the error."""
    if not (text.isdecimal() and len(text) < 19):  # fits int64
        raise RunFolderError(f"{path}, line {line}: {text!r} is no {what}")
    return int(text)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The content of a CSV file; None is an empty cell."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return encodable(file.getvalue())


def csv_of(rows: Sequence[Mapping[str, Any]], header: bool = True) -> str:
    """Return rows as lines of a CSV file with the columns of the first row.

    Args:
        rows: column -> value, at least one row.
        header: whether the first line names the columns.

    Raises:
        ValueError: a row has a column that the first row lacks.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return encodable(file.getvalue())
