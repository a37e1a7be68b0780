"""Deals every task's training samples to the clients that take part in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfl.data.partitions.base import Partition
from cfl.data.partitions.client_shares import ClientShares, Shares
from cfl.data.partitions.natural import check_owners
from cfl.data.types import Task
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError


def client_indices(
    tasks: Sequence[Task],
    partition: Partition,
    members: Sequence[np.ndarray],
    num_clients: int,
    seed: int,
    repartition: bool,
) -> list[ClientShares]:
    """Indices of the samples of each task that every participating client holds.

    Args:
        tasks: the stream's tasks, in order.
        partition: the rule.
        members: client ids of each task, ascending, as from :meth:`cfl.data.participation.Participation.members`. With
            ``repartition`` a task may have none; its samples are then dealt to nobody.
        num_clients: number of clients in the whole federation.
        seed: the run's seed; task ``t`` is dealt with the generator of (seed, "partition", t).
        repartition: True deals each task anew among its members (FOT). False deals the training set once among all
            clients: if the tasks share it, a client has the same samples in every task it takes part in (Fed-A-GEM's
            permuted and rotated MNIST), and samples of clients that are no members of a task are not used in it. If
            their training sets differ, these are dealt as one set in which no two tasks share a class, so that clients
            may hold many samples of one task and few, or none, of another.

    Returns:
        per task, client id to ascending int64 indices into ``task.train``, as views of one flat array. A client's
        array is empty only if the partition allows that.

    Raises:
        ConfigError: ``data.stream`` of which a task has no training sample; ``data.repartition`` when it is False
            though the tasks have different training sets and some client does not take part in all of them; or what
            ``partition`` refuses.
    """
    for t, task in enumerate(tasks):
        if not len(task.train):
            value = f"{task.name!r}, which is task {t} and has no training sample"
            raise ConfigError("data.stream", value, "training samples of every task's classes")
    if partition.by_owner:
        check_owners([_owners(task) for task in tasks], num_clients)
    if repartition:
        indices = []
        for t, (task, clients) in enumerate(zip(tasks, members, strict=True)):
            shares = _deal(t, task, partition, clients, seed) if len(clients) else Shares.of([])
            indices.append(ClientShares(clients, shares))
        return indices
    for task in tasks:
        if task.train.labels is not tasks[0].train.labels:
            return _dealt_as_one(tasks, partition, members, num_clients, seed)
    shares = _deal(0, tasks[0], partition, np.arange(num_clients), seed)
    return [ClientShares(clients, shares, rows=clients) for _, clients in zip(tasks, members, strict=True)]


def _dealt_as_one(
    tasks: Sequence[Task], partition: Partition, members: Sequence[np.ndarray], num_clients: int, seed: int
) -> list[ClientShares]:
    """Deal all training sets together; every task has classes of its own."""
    if any(len(clients) != num_clients for clients in members):
        raise ConfigError(
            "data.repartition",
            False,
            "true where clients take part in some tasks only: different training sets are dealt as one to clients that "
            "take part in all",
        )
    labels = [task.train.groups.numpy() for task in tasks]
    firsts = np.cumsum([0] + [int(of_task.max(initial=-1)) + 1 for of_task in labels])
    starts = np.cumsum([0] + [len(of_task) for of_task in labels])
    together = np.concatenate([of_task + first for of_task, first in zip(labels, firsts, strict=False)])
    owners = [of_task for task in tasks if (of_task := _owners(task)) is not None]
    owner = np.concatenate(owners) if len(owners) == len(tasks) else None
    dealt = partition.deal(together, owner, np.arange(num_clients), numpy_generator(seed, "partition", 0))
    parts = _checked(dealt, partition, num_clients, len(together))
    return [
        ClientShares(clients, Shares.of([_between(part, *starts[t : t + 2].tolist()) for part in parts]))
        for t, clients in enumerate(members)
    ]


def _between(part: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The numbers from ``start`` to below ``stop`` of an ascending array, less ``start``."""
    return part[np.searchsorted(part, start) : np.searchsorted(part, stop)] - start


def _owners(task: Task) -> np.ndarray | None:
    return None if task.train.clients is None else task.train.clients.numpy()


def _deal(t: int, task: Task, partition: Partition, clients: np.ndarray, seed: int) -> Shares:
    generator = numpy_generator(seed, "partition", t)
    try:
        parts = partition.deal(task.train.groups.numpy(), _owners(task), clients, generator)
    except ConfigError as error:
        raise ConfigError(error.key, error.value, f"{error.valid} (task {t}, {task.name!r})") from error
    return _checked(parts, partition, len(clients), len(task.train))


def _checked(parts: Sequence[np.ndarray], partition: Partition, num_clients: int, num_samples: int) -> Shares:
    """Return the shares after checking that all clients have one and that no sample has two clients.

    An instance of :class:`Shares` is returned unchecked.

    Raises:
        ConfigError: ``data.partition``; its class returns something else.
    """
    if isinstance(parts, Shares):
        return parts
    valid = f"for each of {num_clients} clients ascending integers from 0 to {num_samples - 1}, each at most once"
    if not isinstance(parts, Sequence) or len(parts) != num_clients:
        found = f"{len(parts)} shares" if isinstance(parts, Sequence) else type(parts).__name__
        raise ConfigError("data.partition", f"{type(partition).__name__}, which gives {found}", valid)
    for client, part in enumerate(map(np.asarray, parts)):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            found = f"client {client} {part.dtype} {list(part.shape)}"
        elif len(part) and not (part[0] >= 0 and part[-1] < num_samples and bool((part[1:] > part[:-1]).all())):
            found = f"client {client} {len(part)} numbers, the first {part[0]} and the last {part[-1]}"
        else:
            continue
        raise ConfigError("data.partition", f"{type(partition).__name__}, which gives {found}", valid)
    shares = Shares.of([np.asarray(part, dtype=np.int64) for part in parts])
    counts = np.bincount(shares.samples, minlength=num_samples)
    if (most := int(counts.max())) > 1:
        found = f"sample {int(counts.argmax())} to {most} clients"
        raise ConfigError("data.partition", f"{type(partition).__name__}, which gives {found}", valid)
    return shares
