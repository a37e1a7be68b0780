"""The rows of a partition report."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cfl.data.report import write_partition_csv
from cfl.data.types import Task


def partition_rows(tasks: Sequence[Task], indices: Sequence[Mapping[int, np.ndarray]]) -> list[dict[str, Any]]:
    """One row per task and client that takes part in it, as written, with numbers as integers."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "partition.csv"
        write_partition_csv(path, tasks, indices)
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    return [{key: value if key == "hash" else int(value) for key, value in row.items()} for row in rows]
