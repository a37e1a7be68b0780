"""Every task's training samples, dealt to the clients that take part in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfl.data.partitions.base import Partition
from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.data.types import Task
from cfl.errors import ConfigError
from cfl.randomness import numpy_generator


def client_indices(
    tasks: Sequence[Task],
    partition: Partition,
    members: Sequence[np.ndarray],
    num_clients: int,
    seed: int,
    repartition: bool,
) -> list[ClientShares]:
    """Which samples of each task every participating client holds.

    Args:
        tasks: the stream's tasks, in order.
        partition: the rule.
        members: client ids of each task, ascending, as from :meth:`cfl.data.participation.Participation.members`.
        num_clients: number of clients in the whole federation.
        seed: the run's seed; task ``t`` is dealt with the generator of (seed, "partition", t).
        repartition: True deals each task anew among its members (FOT). False deals the training set once among all
            clients, so that a client sees the same samples in every task it takes part in (Fed-A-GEM's permuted and
            rotated MNIST); the samples of clients that are no members of a task then rest.

    Returns:
        per task, client id to ascending int64 indices into ``task.train``, as views of one flat array. A client's
        array is empty only if the partition allows that.

    Raises:
        ConfigError: ``data.repartition`` when it is False though the tasks have different training sets, or what
            ``partition`` refuses.
    """
    if repartition:
        indices = []
        for t, (task, clients) in enumerate(zip(tasks, members, strict=True)):
            indices.append(ClientShares(clients, _deal(t, task, partition, len(clients), seed)))
        return indices
    for task in tasks:
        if task.train.labels is not tasks[0].train.labels:
            raise ConfigError(
                "data.repartition",
                repartition,
                f"true, because the training sets of tasks {tasks[0].name!r} and {task.name!r} differ; false needs a "
                "stream whose tasks share one training set (permuted, rotated)",
            )
    shares = _deal(0, tasks[0], partition, num_clients, seed)
    return [ClientShares(clients, shares, rows=clients) for _, clients in zip(tasks, members, strict=True)]


def _deal(t: int, task: Task, partition: Partition, num_clients: int, seed: int) -> Shares:
    try:
        parts = partition.split(task.train.labels.numpy(), num_clients, numpy_generator(seed, "partition", t))
    except ConfigError as error:
        raise ConfigError(error.key, error.value, f"{error.valid} (task {t}, {task.name!r})") from error
    return parts if isinstance(parts, Shares) else Shares.of(parts)
