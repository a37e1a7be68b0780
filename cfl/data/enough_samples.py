"""Checks which clients have enough samples to take part in a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cfl.data.partitions.client_shares import share_sizes
from cfl.data.schedule import Schedule
from cfl.runtime.errors import ConfigError


def check_every_client_trains(
    indices: Sequence[Mapping[int, np.ndarray]], schedule: Schedule, period: str = "task"
) -> None:
    """Refuse a partition under which a sampled client would have no batch.

    Args:
        indices: per period, client -> its samples.
        schedule: says whether a batch may be partial.
        period: what a period is called: ``task``, or ``round`` with a stream in time.

    Raises:
        ConfigError: naming the first period and client without a batch.
    """
    for number, clients in enumerate(indices):
        sizes = share_sizes(clients)
        if not (idle := np.flatnonzero(sizes < _fewest(schedule))).size:
            continue
        size, client = int(sizes[idle[0]]), list(clients)[idle[0]]
        if size > 0:
            raise ConfigError(
                "schedule.drop_last",
                True,
                f"false, or schedule.batch_size of at most {size}: client {client} has {size} samples of "
                f"{period} {number}, which is less than one batch of {schedule.batch_size}; with data.exposure: "
                "sequential also data.participation: Holders",
            )
        raise ConfigError(
            "data.partition",
            f"client {client} has no sample of {period} {number}",
            "a partition that gives every client at least one sample, or data.participation: Holders, under which "
            "clients take part in the tasks of which they have samples",
        )


def holders(held: Mapping[int, np.ndarray], schedule: Schedule, min_samples: int) -> np.ndarray:
    """Ascending ids of the clients that have enough samples and at least one batch.

    Args:
        held: client -> its samples of one task, clients ascending.
        schedule: says whether a batch may be partial.
        min_samples: smallest number of samples that is enough.
    """
    clients = np.fromiter(held, dtype=np.int64, count=len(held))
    return clients[share_sizes(held) >= max(min_samples, _fewest(schedule))]


def _fewest(schedule: Schedule) -> int:
    """Smallest number of samples that gives a client a batch."""
    return schedule.batch_size if schedule.drop_last else 1
