"""Neighbours, pairs of clients that have a common mask: a regular graph over a sum's clients (Bell et al., 2020)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def neighbours_of(clients: Collection[int], degree: int | None, generator: np.random.Generator) -> dict[int, list[int]]:
    """Client -> its neighbours, ascending: the nearest ones, as many on either side, on a circle in random order.

    Args:
        clients: the sum's clients.
        degree: number of neighbours of each client, even. None, or at least the number of other clients: all others.
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
    """Number of shares that recover a client's secrets, held by its neighbours and by itself.

    Args:
        threshold: more than this share of the holders is needed.
        neighbours: number of the client's neighbours.
    """
    return int(threshold * (neighbours + 1) + 1e-9) + 1  # 0.57 * 100 is 56.99... in floats
