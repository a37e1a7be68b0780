"""Read clients' attention to the knowledge of other clients from a run's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("task", "client", "layer", "sources", "source_tasks", "attention")
"""Columns that a table needs; those of FedWeIT and CONFEDMADE have them."""


@dataclass(frozen=True)
class Attention:
    """The attention of all clients in one layer and task.

    Attributes:
        borrowers: clients, ascending.
        lenders: (client, task) of the knowledge that could be borrowed, in the order of task and client.
        values: ``[borrowers][lenders]``, of either sign and without bounds; None for a client's own knowledge.
    """

    borrowers: Sequence[int]
    lenders: Sequence[tuple[int, int]]
    values: Sequence[Sequence[float | None]]


def read_attention(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Attention]]:
    """Return layer -> task -> attention, without layers and tasks in which nothing could be borrowed.

    Args:
        rows: the rows of a run's ``fedweit.csv``; rows without the :data:`COLUMNS` are skipped.
    """
    found: dict[str, dict[int, dict[int, dict[tuple[int, int], float]]]] = {}
    for row in rows:
        if not all(column in row for column in COLUMNS) or not row["sources"]:
            continue
        clients, tasks, values = (str(row[column]).split() for column in COLUMNS[3:])
        own = {(int(c), int(t)): float(value) for c, t, value in zip(clients, tasks, values, strict=True)}
        found.setdefault(str(row["layer"]), {}).setdefault(int(row["task"]), {})[int(row["client"])] = own
    return {layer: {task: _whole(of) for task, of in tasks.items()} for layer, tasks in found.items()}


def _whole(of: Mapping[int, Mapping[tuple[int, int], float]]) -> Attention:
    lenders = sorted({lender for own in of.values() for lender in own}, key=lambda lender: (lender[1], lender[0]))
    borrowers = sorted(of)
    return Attention(borrowers, lenders, [[of[client].get(lender) for lender in lenders] for client in borrowers])
