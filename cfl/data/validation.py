"""Sets aside a share of each client's training samples of each task for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.randomness.generators import numpy_generator


def set_aside(
    dealt: Sequence[Mapping[int, np.ndarray]], share: float, seed: int
) -> tuple[list[ClientShares], list[ClientShares]]:
    """Split every client's samples of every task into training and validation samples.

    Of n samples ``share * n``, rounded, are set aside: at least one, and never all, so that a client with a single
    sample has none for validation. They are drawn at random, keyed by (seed, task, client). If a client has the same
    samples in several tasks (rotated or permuted images that are dealt once), the same ones are set aside in all.

    Args:
        dealt: per task of the stream, client -> indices of its samples; clients ascending.
        share: in (0, 1).
        seed: the run's seed.

    Returns:
        Per task, client -> training indices, and per task, client -> validation indices; both in the given order.
    """
    first: dict[tuple[int, bytes], int] = {}
    cut = [_cut(task, of_task, share, seed, first) for task, of_task in enumerate(dealt)]
    return [train for train, _ in cut], [aside for _, aside in cut]


def _cut(
    task: int, of_task: Mapping[int, np.ndarray], share: float, seed: int, first: dict[tuple[int, bytes], int]
) -> tuple[ClientShares, ClientShares]:
    """Split one task; ``first`` maps (client, digest of its samples) to the earliest task with just these samples."""
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
