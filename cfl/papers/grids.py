"""Figures of a run that are a grid of numbers with named rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cfl.reporting.attention import Attention


@dataclass(frozen=True)
class Grid:
    """Numbers with named rows and columns.

    Attributes:
        rows: names of the rows.
        columns: names of the columns.
        values: ``[rows][columns]``, None for empty entries.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]

    def entries(self) -> list[tuple[tuple[str, str], float]]:
        """Return (row, column) and value of every entry, row by row, without empty entries."""
        return [
            ((row, column), value)
            for row, line in zip(self.rows, self.values, strict=True)
            for column, value in zip(self.columns, line, strict=True)
            if value is not None
        ]


def mean_grid(grids: Sequence[Grid]) -> Grid:
    """Return the mean of every entry over the grids that have it, with the rows and columns of all grids."""
    rows = tuple(dict.fromkeys(row for grid in grids for row in grid.rows))
    columns = tuple(dict.fromkeys(column for grid in grids for column in grid.columns))
    found: dict[tuple[str, str], list[float]] = {}
    for grid in grids:
        for place, value in grid.entries():
            found.setdefault(place, []).append(value)
    means = {place: math.fsum(values) / len(values) for place, values in found.items()}
    return Grid(rows, columns, [[means.get((row, column)) for column in columns] for row in rows])


def attention_grid(attention: Attention, task: int, sequences: Mapping[str, Any] | None) -> Grid:
    """Return attention as a grid with names of clients, followed by the tasks learned if the settings list them.

    Args:
        attention: the attention in one task.
        task: the task of the borrowers.
        sequences: ``data.sequences`` of the run.
    """
    options = (sequences or {}).get("init_args") or {}
    tasks = options.get("tasks")

    def name(client: int, learned: int) -> str:
        if tasks is None or client >= len(tasks):
            return f"client {client}"
        return f"client {client} ({', '.join(str(t) for t in tasks[client][: learned + 1])})"

    several = len({learned for _, learned in attention.lenders}) > 1  # the knowledge base grows with tasks
    lenders = [name(c, learned) + (f", task {learned}" if several else "") for c, learned in attention.lenders]
    return Grid(tuple(name(client, task) for client in attention.borrowers), tuple(lenders), attention.values)
