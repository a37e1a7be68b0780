"""Divides the clients of a round among processes and into cohorts, by their numbers of samples."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace

import numpy as np

from cfl.data.schedule import Schedule


def local_steps(size: int, schedule: Schedule) -> int:
    """Optimizer steps of a client with ``size`` samples in one round."""
    per_epoch = size // schedule.batch_size if schedule.drop_last else -(-size // schedule.batch_size)
    return per_epoch * schedule.local_epochs


def deal_clients(steps: Mapping[int, int], processes: int) -> list[list[int]]:
    """Divide clients among processes with nearly equal numbers of local steps.

    The client with the most steps comes first, and each goes to the process with the fewest steps so far.

    Args:
        steps: client -> number of local steps.
        processes: number of processes, at least 1.

    Returns:
        One list of clients per process, ascending; empty lists if there are fewer clients than processes.
    """
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]  # a heap: fewest steps first, then the lowest process
    for client in sorted(steps, key=lambda client: (-steps[client], client)):
        load, process = loads[0]
        shares[process].append(client)
        heapreplace(loads, (load + steps[client], process))
    return [sorted(share) for share in shares]


def deal_cohorts(sizes: Mapping[int, int], schedule: Schedule) -> list[list[int]]:
    """Group clients of similar size into cohorts of nearly equal width, so that there is little padding.

    If ``schedule.at_once`` clients are computed at the same time, the width of every cohort except the last is a
    multiple of this number, so that no thread is idle. Cohorts with too much padding are then split further.

    Args:
        sizes: client -> number of samples.
        schedule: gives the greatest width, the number of clients computed at the same time, and the greatest share of
            padding if the engine computes padding.
    """
    if not sizes:
        return []
    order = sorted(sizes, key=lambda client: (-sizes[client], client))
    count = -(-len(order) // schedule.width)
    if schedule.width >= (turn := schedule.at_once) > 1:
        each = min(-(-len(order) // (count * turn)) * turn, schedule.width // turn * turn)
        even = [order[start : start + each] for start in range(0, len(order), each)]
    else:
        even = [part.tolist() for part in np.array_split(np.asarray(order), count)]
    if schedule.most_padding is None:
        return even
    return [group for part in even for group in _split(part, sizes, schedule, schedule.most_padding)]


def _split(clients: list[int], sizes: Mapping[int, int], schedule: Schedule, most_padding: float) -> list[list[int]]:
    """Split a cohort, largest clients first, before each client that would raise the padding above its limit.

    A step is as wide as its widest batch, for every client of the cohort.
    """
    batches = {size: _batches(size, schedule) for size in {sizes[client] for client in clients}}
    groups: list[list[int]] = []
    widest, used = np.zeros(0, dtype=np.int64), 0
    for client in clients:
        own = batches[sizes[client]]
        if groups:  # the largest client came first, so no other has more steps
            wider = widest.copy()
            wider[: len(own)] = np.maximum(wider[: len(own)], own)
            computed = (len(groups[-1]) + 1) * int(wider.sum())
            if computed - used - int(own.sum()) <= most_padding * computed:
                groups[-1].append(client)
                widest, used = wider, used + int(own.sum())
                continue
        groups.append([client])
        widest, used = own, int(own.sum())
    return groups


def _batches(size: int, schedule: Schedule) -> np.ndarray:
    """``[S]`` samples in each local step of a client with ``size`` samples."""
    rest = 0 if schedule.drop_last else size % schedule.batch_size
    epoch = [schedule.batch_size] * (size // schedule.batch_size) + [rest] * (rest > 0)
    return np.asarray(epoch * schedule.local_epochs, dtype=np.int64)
