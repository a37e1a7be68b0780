"""Who masks with whom: a regular graph over the clients of a sum (Bell et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def neighbours_of(clients: Sequence[int], degree: int | None, generator: np.random.Generator) -> dict[int, list[int]]:
    """Client -> its neighbours, ascending: a circle in random order, in which each has as many on either side.

    Args:
        clients: in any order.
        degree: neighbours of each, even; None, or at least as many as there are others, for all others.
        generator: draws the order.
    """
    ordered = sorted(clients)
    if degree is None or degree >= len(ordered) - 1:
        return {client: [other for other in ordered if other != client] for client in ordered}
    circle = [ordered[place] for place in generator.permutation(len(ordered)).tolist()]
    reach = [*range(-(degree // 2), 0), *range(1, degree // 2 + 1)]
    return {
        client: sorted(circle[(place + offset) % len(circle)] for offset in reach)
        for place, client in enumerate(circle)
    }


def shares_needed(threshold: float, neighbours: int) -> int:
    """How many of the holders of a client's shares, itself among them, recover its secrets.

    Args:
        threshold: share of the holders, more than which are needed.
        neighbours: of the client.
    """
    return int(threshold * (neighbours + 1)) + 1
