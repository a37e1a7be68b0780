"""Training samples set aside for validation: of each client and task a share of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.randomness.generators import numpy_generator


def set_aside(
    dealt: Sequence[Mapping[int, np.ndarray]], share: float, seed: int
) -> tuple[list[ClientShares], list[ClientShares]]:
    """Cut every client's samples of every task into those it trains on and those that validate it.

    Of n samples ``share * n``, rounded, are set aside: at least one, and never all. So a client with a single sample
    has none for validation. Which ones is random, keyed by (seed, task, client). Where a client has the same samples in
    several tasks (rotated or permuted images that are dealt once), the same ones are set aside in all of them.

    Args:
        dealt: per task of the stream, client -> indices of its samples; clients ascending.
        share: in (0, 1).
        seed: the run's seed.

    Returns:
        Per task, client -> indices to train on, and those set aside; both in the order in which they were dealt.
    """
    first: dict[tuple[int, bytes], int] = {}
    cut = [_cut(task, of_task, share, seed, first) for task, of_task in enumerate(dealt)]
    return [train for train, _ in cut], [aside for _, aside in cut]


def _cut(
    task: int, of_task: Mapping[int, np.ndarray], share: float, seed: int, first: dict[tuple[int, bytes], int]
) -> tuple[ClientShares, ClientShares]:
    """Both parts of one task; ``first`` is the earliest task in which a client had exactly these samples."""
    train, aside = [], []
    for client, samples in of_task.items():
        key = first.setdefault((client, hashlib.sha256(samples.tobytes()).digest()), task)
        count = max(0, min(max(1, round(share * len(samples))), len(samples) - 1))
        chosen = np.zeros(len(samples), dtype=bool)
        chosen[numpy_generator(seed, "validation", key, client).permutation(len(samples))[:count]] = True
        train.append(samples[~chosen])
        aside.append(samples[chosen])
    clients = np.fromiter(of_task, dtype=np.int64, count=len(of_task))
    return ClientShares(clients, Shares.of(train)), ClientShares(clients, Shares.of(aside))
