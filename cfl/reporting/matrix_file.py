"""Accuracy matrices as CSV: a row per task learned, a column per task measured."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from cfl.reporting.csv_file import RunFolderError, csv_text, number_in, read_csv
from cfl.runtime.atomic_write import write_whole


def write_matrix_csv(path: Path, matrix: Tensor, initial: Tensor | None = None) -> None:
    """Write an accuracy matrix so that :func:`read_matrix_csv` returns the same bits.

    The header is ``after_task,task_0,task_1,...``. A first row ``init`` has the accuracies before training. Row
    ``t`` has those after learning task t, for every task. Cells that were not evaluated are empty.

    Args:
        path: the file; its folder must exist.
        matrix: ``[T, T]`` in percent, NaN where not evaluated.
        initial: ``[T]`` in percent; None leaves the row out.

    Raises:
        ValueError: wrong shapes, or an infinite value.
    """
    tasks = len(matrix)
    if matrix.shape != (tasks, tasks) or not tasks or (initial is not None and initial.shape != (tasks,)):
        shape = None if initial is None else list(initial.shape)
        raise ValueError(f"a matrix [T, T] and initial [T] are needed, got {list(matrix.shape)} and {shape}")
    rows = matrix.double().tolist() if initial is None else [initial.double().tolist(), *matrix.double().tolist()]
    if any(math.isinf(x) for row in rows for x in row):
        raise ValueError("an accuracy is infinite")
    labels = [*([] if initial is None else ["init"]), *map(str, range(tasks))]
    cells = [[label, *("" if math.isnan(x) else repr(x) for x in row)] for label, row in zip(labels, rows, strict=True)]
    write_whole(Path(path), csv_text(_header(tasks), cells))


def _header(tasks: int) -> list[str]:
    return ["after_task", *(f"task_{i}" for i in range(tasks))]


def read_matrix_csv(path: Path) -> tuple[Tensor, Tensor | None]:
    """Read a matrix that :func:`write_matrix_csv` wrote; rows may be in any order.

    Returns:
        ``matrix [T, T]`` float64, NaN where not evaluated, and ``initial [T]``, None without a row ``init``.

    Raises:
        RunFolderError: the file is missing or not such a table; the message names the file and the line.
    """
    header, lines = read_csv(path)
    tasks = len(header) - 1
    if tasks < 1 or header != _header(tasks):
        raise RunFolderError(f"{path}: the first line must be after_task,task_0,task_1,... but is {','.join(header)!r}")
    rows: dict[str, Tensor] = {}
    valid = ["init", *(str(t) for t in range(tasks))]
    for line, (label, *cells) in lines:
        if label not in valid:
            raise RunFolderError(f"{path}, line {line}: row {label!r} cannot be; valid: init, 0 .. {tasks - 1}")
        if label in rows:
            raise RunFolderError(f"{path}, line {line}: row {label!r} appears twice")
        rows[label] = torch.tensor([number_in(cell, path, line) for cell in cells], dtype=torch.float64)
    if absent := [label for label in valid[1:] if label not in rows]:
        last = lines[-1][0] if lines else 1
        raise RunFolderError(f"{path}, line {last}: ends without row {absent[0]}, of {tasks} tasks")
    return torch.stack([rows[str(t)] for t in range(tasks)]), rows.get("init")
