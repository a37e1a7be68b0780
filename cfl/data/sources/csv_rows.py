"""Reads the columns of a CSV file, some as numbers and others as texts."""

from __future__ import annotations

import csv
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """The rows of a file.

    Attributes:
        columns: names of the columns with numbers, D of them.
        numbers: float64 ``[N, D]``, finite.
        texts: name of a column -> its N texts.
    """

    columns: tuple[str, ...]
    numbers: NDArray[np.float64]
    texts: dict[str, list[str]]


def header(path: Path) -> list[str]:
    """Names of a file's columns.

    Raises:
        ValueError: see :func:`read_rows`.
    """
    return next(_lines(path))[1]


def read_rows(
    path: Path, texts: Sequence[str] = (), numbers: Sequence[str] | None = None, without: Collection[str] = ()
) -> Rows:
    """Read a file in UTF-8 whose first line names the columns, with a comma, a semicolon or a tab between them.

    Args:
        path: the file.
        texts: columns that are kept as texts.
        numbers: columns that hold numbers, in the order wanted; None: all but ``texts`` and ``without``.
        without: columns that are left out.

    Raises:
        ValueError: what is wrong with the file, in one line without its name: a column is missing, a row has more or
            fewer fields than the first line, a text is empty, or a field is no finite number.
    """
    lines = _lines(path)
    _, names = next(lines)
    if numbers is None:
        numbers = [name for name in names if name not in texts and name not in without]
    if lacking := [name for name in (*texts, *numbers) if name not in names]:
        raise ValueError(f"it lacks the column {lacking[0]}; it has {', '.join(names)}")
    if not numbers:
        raise ValueError(f"no column with numbers is left of {', '.join(names)}")
    places, kept = [names.index(name) for name in numbers], [(name, names.index(name)) for name in texts]
    found, words = array("d"), {name: list[str]() for name in texts}
    known: dict[str, str] = {}  # one object for all equal texts
    first, without_number = "", Counter[str]()
    for line, fields in lines:
        try:
            found.extend([number(fields[place]) for place in places])
        except ValueError:
            wrong = [(names[p], fields[p]) for p in places if not _is_number(fields[p])]
            first = first or f"line {line}, column {wrong[0][0]}: {wrong[0][1][:40]!r} is no number"
            without_number.update(name for name, _ in wrong)
        for name, place in kept:
            if not fields[place].strip():
                raise ValueError(f"line {line}, column {name} is empty")
            words[name].append(known.setdefault(fields[place], fields[place]))
    if first:
        counts = ", ".join(f"{name} ({without_number[name]:,})" for name in numbers if name in without_number)
        raise ValueError(f"{first}; rows without a number, by column: {counts}")
    values = np.frombuffer(found, dtype=np.float64).reshape(-1, len(places))
    if not len(values):
        raise ValueError("it has no rows below its first line")
    if not (finite := np.isfinite(values)).all():
        row, place = np.argwhere(~finite)[0].tolist()
        raise ValueError(f"row {row + 1} below the first line, column {numbers[place]}: {values[row, place]}")
    return Rows(tuple(numbers), values, words)


def number(text: str) -> float:
    """The number that a text says in ASCII, as ``-1.5e3``.

    Raises:
        ValueError: it is none. ``1_0`` and digits of other scripts, which are numbers in Python, are none in a table.
    """
    if "_" in text or not text.strip().isascii():
        raise ValueError(f"could not convert string to float: {text[:40]!r}")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line that is not empty; the first has the names of the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            unquoted = re.sub('"[^"]*"', "", first)
            separator = next((sign for sign in ",;\t" if sign in unquoted), ",")
            reader = csv.reader(file, delimiter=separator, strict=True)
            names: list[str] = []
            for fields in reader:
                if not fields:
                    continue
                if not names:
                    names = [name.strip() for name in fields]
                    if wrong := [name for name in names if not name or names.count(name) > 1]:
                        raise ValueError(f"its first line should name every column once; found {wrong[0]!r}")
                    yield reader.line_num, names
                    continue
                if len(fields) != len(names):
                    raise ValueError(f"line {reader.line_num} has {len(fields)} fields, the first line {len(names)}")
                yield reader.line_num, fields
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"it is no CSV file in UTF-8 ({error})") from error
    if not names:
        raise ValueError("it is empty")
