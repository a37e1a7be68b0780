"""Read ``partition.csv``, the number of samples of each class that each client holds in each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cfl.data.report import MOST_CLIENTS, MOST_TASKS, evenly
from cfl.reporting.csv_file import RunFolderError, index_in, read_csv


@dataclass(frozen=True, eq=False)
class Partition:
    """Number of samples of each class that each client holds in each task.

    Attributes:
        tasks: the tasks shown.
        counts: samples ``[tasks, classes, clients]``; -1 in the columns of clients that take no part in a task.
        total_clients: number of all clients, also of those that were left out.
        total_tasks: number of all tasks, also of those that were left out.
    """

    tasks: Sequence[int]
    counts: np.ndarray
    total_clients: int
    total_tasks: int


def read_partition(path: Path) -> Partition:
    """Read ``partition.csv``, thinned to the first clients and to evenly spaced tasks, as in the run's own picture.

    Raises:
        RunFolderError: the file is not such a table.
    """
    header, lines = read_csv(path)
    classes = [k for k, name in enumerate(header) if name.startswith("class_")]
    if header[:2] != ["task", "client"] or not classes:
        raise RunFolderError(f"{path}: the first line must be task,client,... with columns class_00, class_01, ...")
    rows = []
    for line, row in lines:
        rows.append((index_in(row[0], "task", path, line), index_in(row[1], "client", path, line), line, row))
    tasks = sorted({task for task, *_ in rows})
    clients = 1 + max((client for _, client, *_ in rows), default=-1)
    if not tasks:
        raise RunFolderError(f"{path}: there is no client in it")
    kept = [tasks[k] for k in evenly(len(tasks), MOST_TASKS)]
    counts = np.full((len(kept), len(classes), min(clients, MOST_CLIENTS)), -1, dtype=np.int64)
    place = {task: k for k, task in enumerate(kept)}
    for task, client, line, row in rows:
        if task in place and client < MOST_CLIENTS:
            counts[place[task], :, client] = [index_in(row[k], "number of samples", path, line) for k in classes]
    return Partition(kept, counts, clients, len(tasks))
