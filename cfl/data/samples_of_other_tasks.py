"""Samples of other tasks that clients store for cumulative and joint training."""

from __future__ import annotations

import numpy as np

from cfl.data.client_inputs import ClientInputs
from cfl.data.partitions.client_shares import share_sizes


def samples_of_other_tasks(data: ClientInputs) -> int:
    """Largest number of samples of other tasks that a client trains on during a task, over clients and tasks.

    With ``data.exposure: cumulative`` they are those of its earlier tasks, with ``joint`` those of all its other tasks.
    The number is 0 with ``sequential`` and ``unannounced``, and with ``asynchronous`` and ``streaming``, where each
    sample is used in a single period or round. With ``streaming-cumulative`` all samples that a client has met count.
    """
    if data.exposure == "streaming-cumulative":
        return data.most_trained_on
    if data.exposure not in ("cumulative", "joint"):
        return 0
    held = [(np.fromiter(own, dtype=np.int64, count=len(own)), share_sizes(own)) for own in data.indices]
    before, total = (np.zeros(data.num_clients, dtype=np.int64) for _ in range(2))
    for clients, sizes in held:
        total[clients] += sizes
    most = 0
    for clients, sizes in held:
        others = before[clients] if data.exposure == "cumulative" else total[clients] - sizes
        most = max(most, int(others.max(initial=0)))
        before[clients] += sizes
    return most


def bytes_of_other_tasks(data: ClientInputs) -> int:
    """Bytes of the :func:`samples_of_other_tasks`: one byte for each pixel, label and task."""
    channels, height, width = data.input_shape
    return samples_of_other_tasks(data) * (channels * height * width + 2)
