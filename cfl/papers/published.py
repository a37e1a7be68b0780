"""Published numbers, read from CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cfl.reporting.compare.statistics import Spread
from cfl.runtime.errors import ConfigError

FIRST, LAST = ["paper", "table"], ["figure", "mean", "std", "note"]
"""Columns of every file, before and after those with the table's axes."""


@dataclass(frozen=True)
class Published:
    """One published number.

    Attributes:
        place: axis -> value, which names the cell.
        figure: what the number is, e.g. ``ACC``.
        mean: the number, in the unit of the table's column.
        std: its standard deviation over runs; None if the paper gives none.
        note: a remark about the number, often empty.
    """

    place: Mapping[str, str]
    figure: str
    mean: float
    std: float | None = None
    note: str = ""

    @property
    def spread(self) -> Spread:
        """Mean and deviation in the same form as for our numbers."""
        return Spread(self.mean, self.std, 1)


def read_published(path: Path, paper: str, table: str, axes: Sequence[str]) -> list[Published]:
    """All numbers of one table.

    Args:
        path: columns ``paper, table``, one per axis in any order, ``figure, mean, std, note``; a row per number.
        paper: name of the paper that each row must name.
        table: name of the table that each row must name.
        axes: names of the table's axes.

    Raises:
        ConfigError: another header, a row of another table, a number that is not finite, or a cell that appears twice.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        header = list(reader.fieldnames or [])
        between = header[len(FIRST) : -len(LAST)]
        if header != [*FIRST, *between, *LAST] or sorted(between) != sorted(axes):
            raise ConfigError(str(path), ",".join(header), f"the columns {','.join([*FIRST, *axes, *LAST])}")
        found: dict[tuple[str, ...], Published] = {}
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if (row["paper"], row["table"]) != (paper, table):
                raise ConfigError(where, f"{row['paper']}, {row['table']}", f"rows of {paper}, {table}")
            cell = (*(row[axis] for axis in axes), row["figure"])
            if cell in found:
                raise ConfigError(where, ", ".join(cell), "every cell once")
            std = _number(row["std"], where) if row["std"] else None
            if std is not None and std < 0:
                raise ConfigError(where, row["std"], "a standard deviation of at least 0, or nothing")
            place = {axis: row[axis] for axis in axes}
            found[cell] = Published(place, row["figure"], _number(row["mean"], where), std, row["note"])
    return list(found.values())


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(where, text, "a finite number")
    return value
