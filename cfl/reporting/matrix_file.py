"""Accuracy matrices as CSV: a row per task learned, a column per task measured."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from cfl.runtime.atomic_write import write_whole


class RunFolderError(ValueError):
    """A run folder that cannot be read; the message is one line naming the file and what is wrong with it."""


def write_matrix_csv(path: Path, matrix: Tensor, initial: Tensor | None = None) -> None:
    """Write an accuracy matrix so that :func:`read_matrix_csv` returns the same bits.

    The header is ``after_task,task_0,task_1,...``. A first row ``init`` has the accuracies before training. Row
    ``t`` has those after learning task t. What was not evaluated is an empty cell.

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
    rows = [] if initial is None else [("init", initial)]
    rows += [(str(t), row) for t, row in enumerate(matrix)]
    if any(bool(torch.isinf(row).any()) for _, row in rows):
        raise ValueError("an accuracy is infinite")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["after_task", *(f"task_{i}" for i in range(tasks))])
    for label, row in rows:
        writer.writerow([label, *("" if math.isnan(x) else repr(x) for x in row.double().tolist())])
    write_whole(Path(path), file.getvalue())


def read_matrix_csv(path: Path) -> tuple[Tensor, Tensor | None]:
    """Read what :func:`write_matrix_csv` wrote; rows may be absent (not evaluated) and in any order.

    Returns:
        ``matrix [T, T]`` float64, NaN where not evaluated, and ``initial [T]`` or None where there is no such row.

    Raises:
        RunFolderError: the file is missing or not such a table; the message names the file and the line.
    """
    with open_file(path) as file:
        try:
            lines = [(number, line) for number, line in enumerate(csv.reader(file), start=1) if line]
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path}: not a CSV file: {error}") from None
    header = lines[0][1] if lines else []
    tasks = len(header) - 1
    if tasks < 1 or header != ["after_task", *(f"task_{i}" for i in range(tasks))]:
        raise RunFolderError(f"{path}: the first line must be after_task,task_0,task_1,... but is {','.join(header)!r}")
    rows: dict[str, Tensor] = {}
    valid = ["init", *(str(t) for t in range(tasks))]
    for number, (label, *cells) in lines[1:]:
        if label not in valid:
            raise RunFolderError(f"{path}, line {number}: row {label!r} cannot be; valid: init, 0 .. {tasks - 1}")
        if label in rows:
            raise RunFolderError(f"{path}, line {number}: row {label!r} appears twice")
        if len(cells) != tasks:
            raise RunFolderError(f"{path}, line {number}: {len(cells)} values instead of {tasks}")
        rows[label] = torch.tensor([number_in(cell, path, number) for cell in cells], dtype=torch.float64)
    unknown = torch.full((tasks,), math.nan, dtype=torch.float64)
    return torch.stack([rows.get(str(t), unknown) for t in range(tasks)]), rows.get("init")


def number_in(text: str, path: Path, number: int) -> float:
    """A cell's value, NaN where it is empty; ``path`` and line ``number`` are for the error."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.inf
    if math.isinf(value) or (text and math.isnan(value)):
        raise RunFolderError(f"{path}, line {number}: {text!r} is neither a finite number nor empty")
    return value


def open_file(path: Path) -> IO[str]:
    """A text file of a run folder; :class:`RunFolderError` where it cannot be opened."""
    try:
        return Path(path).open(encoding="utf-8", newline="")
    except OSError as error:
        raise RunFolderError(f"{path}: {'no such file' if not Path(path).exists() else error.strerror}") from None
