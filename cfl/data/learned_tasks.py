"""Deals the samples of a stream's tasks to the clients that learn them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cfl.data.partitions import Partition, client_indices
from cfl.data.sequences import Split
from cfl.data.types import Task


def learners_of(order: np.ndarray, num_tasks: int, members: Sequence[np.ndarray]) -> list[list[tuple[int, int]]]:
    """Per task of the stream, ascending pairs (client, number of the task in its sequence) for all its learners.

    Args:
        order: ``[C, T]`` int64, the stream's number of each client's t-th task.
        num_tasks: number of the stream's tasks.
        members: per t, the clients that take part in their t-th task.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_tasks)]
    taking_part = [set(own.tolist()) for own in members]
    for client, own in enumerate(order.tolist()):
        for task, stream_task in enumerate(own):
            if client in taking_part[task]:
                found[stream_task].append((client, task))
    return found


def dealt_to_learners(
    tasks: Sequence[Task],
    partition: Partition,
    order: np.ndarray,
    members: Sequence[np.ndarray],
    split: Split,
    seed: int,
) -> Sequence[Mapping[int, np.ndarray]]:
    """Per task of the stream, client -> indices into its training set; empty if nobody has a share of the task.

    Args:
        tasks: the stream's tasks.
        partition: how a task's samples are dealt.
        order: as for :func:`learners_of`.
        members: as for :func:`learners_of`.
        split: see :class:`cfl.data.sequences.TaskSequences`.
        seed: the run's seed.

    Raises:
        ConfigError: ``partition`` refuses the samples or the clients.
    """
    num_clients = len(order)
    wanting = [
        np.array([client for client, _ in learners], dtype=np.int64)
        for learners in learners_of(order, len(tasks), members)
    ]
    if split == "whole":
        samples = [np.arange(len(task.train)) for task in tasks]
        return [dict.fromkeys(own.tolist(), every) for own, every in zip(wanting, samples, strict=True)]
    dealt_to = wanting if split == "holders" else [np.arange(num_clients)] * len(tasks)
    return client_indices(tasks, partition, dealt_to, num_clients, seed, repartition=True)


def one_by_one(dealt: Sequence[Mapping[int, np.ndarray]], order: np.ndarray) -> list[Mapping[int, np.ndarray]]:
    """Return the same shares for a stream with separate tasks for every client (:mod:`cfl.data.streams.of_clients`).

    Args:
        dealt: per task of the stream that clients share, client -> samples.
        order: as for :func:`learners_of`.
    """
    return [
        {client: dealt[task][client]} if client in dealt[task] else {}
        for client, own in enumerate(order.tolist())
        for task in own
    ]
