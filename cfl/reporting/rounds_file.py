"""Read ``rounds.csv``: bytes, seconds and the mean of the run's measure after each communication round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cfl.reporting.csv_file import RunFolderError, index_in, number_in, read_csv
from cfl.reporting.measures import CURVES

ROUND_COLUMNS = (*CURVES.values(), "uplink_bytes", "seconds", "task")
"""Columns of ``rounds.csv`` that are read: the mean of each measure, such as ACC in percent, bytes sent and seconds
passed so far, and the task of the round."""
_MOST_ROUNDS = 10**7


def read_rounds(path: Path) -> dict[str, list[float | None]]:
    """Read the columns of a run's ``rounds.csv`` that are compared over rounds.

    Args:
        path: ``rounds.csv``, with the column ``round``, from 0, and any of :data:`ROUND_COLUMNS`.

    Returns:
        Column -> its value after each round, None where the cell is empty. Rounds before the first row are None too: a
        run that was resumed without its earlier table has no rows for them. Empty if there is no such file.

    Raises:
        RunFolderError: an invalid value; the message names the file and the line.
    """
    if not path.exists():
        return {}
    header, lines = read_csv(path)
    if "round" not in header:
        raise RunFolderError(f"{path}: there is no column round")
    names = [name for name in ROUND_COLUMNS if name in header]
    if not names:
        return {}
    rows: list[list[float | None]] = []
    for line, row in lines:
        cells = dict(zip(header, row, strict=True))
        round = index_in(cells["round"], "round", path, line)
        if not rows and round < _MOST_ROUNDS:
            rows = [[None] * len(names)] * round
        if round != len(rows):
            raise RunFolderError(f"{path}, line {line}: round {round} where round {len(rows)} should be")
        rows.append([number_in(cells[name], path, line) if cells[name] else None for name in names])
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def rounds_to(curve: Sequence[float | None], accuracy: float) -> int | None:
    """Return the number of rounds, from 1, after which a learning curve first reaches an accuracy.

    Only rounds with an evaluation are considered. ACC is first rounded to 6 digits behind the point, as in run folders,
    so that a mean which is too low only by a rounding error counts as reached.

    Args:
        curve: ACC in percent after each round, None where not evaluated.
        accuracy: in percent.

    Returns:
        None if the curve never reaches the accuracy.
    """
    return next((r for r, acc in enumerate(curve, start=1) if acc is not None and round(acc, 6) >= accuracy), None)
