"""Who borrowed from whom: clients' attention to a knowledge base, as a run's table has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("task", "client", "layer", "sources", "source_tasks", "attention")
"""What a table has to have, as those of FedWeIT and CONFEDMADE do."""


@dataclass(frozen=True)
class Attention:
    """Of all clients in one layer and task.

    Attributes:
        borrowers: clients, ascending.
        lenders: whose knowledge could be borrowed and in which of their tasks it was learned, by task and client.
        values: ``[borrowers][lenders]``, of either sign and without bounds; None for a client's own knowledge.
    """

    borrowers: Sequence[int]
    lenders: Sequence[tuple[int, int]]
    values: Sequence[Sequence[float | None]]


def read_attention(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Attention]]:
    """Layer -> task -> attention, where there was anything to borrow.

    Args:
        rows: of a run's ``fedweit.csv``; without the :data:`COLUMNS`, nothing is found.
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
