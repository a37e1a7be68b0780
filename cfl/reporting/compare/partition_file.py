"""The table of who holds what, read back."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cfl.reporting.matrix_file import RunFolderError, open_file


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds how much of each class.

    Attributes:
        tasks: the tasks shown.
        counts: samples ``[tasks, classes, clients]``; -1 in the columns of clients that take no part in a task.
        total_clients: how many clients there are; more than are shown where the table was cut.
        total_tasks: likewise.
    """

    tasks: Sequence[int]
    counts: np.ndarray
    total_clients: int
    total_tasks: int


def read_partition(path: Path, max_tasks: int = 12, max_clients: int = 150) -> Partition:
    """Read ``partition.csv``, thinned to the first clients and to evenly spaced tasks, as in the run's own picture.

    Raises:
        RunFolderError: not such a table.
    """
    rows: list[tuple[int, int, list[int]]] = []
    with open_file(path) as file:
        try:
            reader = csv.reader(file)
            header = next(reader, [])
            classes = [k for k, name in enumerate(header) if name.startswith("class_")]
            if header[:2] != ["task", "client"] or not classes:
                raise RunFolderError(
                    f"{path}: the first line must be task,client,... with columns class_00, class_01, ..."
                )
            rows = [(int(row[0]), int(row[1]), [int(row[k]) for k in classes]) for row in reader if row]
        except (csv.Error, UnicodeDecodeError, ValueError, IndexError) as error:
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(f"{path}: not a partition table: {error}") from None
    tasks = sorted({task for task, _, _ in rows})
    clients = 1 + max((client for _, client, _ in rows), default=-1)
    if not tasks or min(client for _, client, _ in rows) < 0:
        raise RunFolderError(f"{path}: there is no client in it")
    kept = [tasks[k] for k in np.unique(np.linspace(0, len(tasks) - 1, min(len(tasks), max_tasks)).round().astype(int))]
    counts = np.full((len(kept), len(classes), min(clients, max_clients)), -1, dtype=np.int64)
    place = {task: k for k, task in enumerate(kept)}
    for task, client, of_class in rows:
        if task in place and client < max_clients:
            counts[place[task], :, client] = of_class
    return Partition(kept, counts, clients, len(tasks))
