"""Writes ``rounds.csv``, a row per round. A resumed run continues it after the last round of its checkpoint."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfl.reporting.csv_file import csv_of
from cfl.runtime.atomic_write import append, write_whole
from cfl.runtime.errors import DamagedFile

_log = logging.getLogger(__name__)


class RoundsTable:
    """The table of a run's rounds.

    Args:
        path: the file.

    Attributes:
        rounds: how many rounds it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = 0
        self._at_checkpoint: Mapping[str, Any] = {}

    def begin(self, rounds: int, earlier: Path) -> None:
        """Start the table of a fit with the rows of the rounds that are finished.

        Rows of rounds after the checkpoint are dropped, because these rounds run again.

        Args:
            rounds: number of finished rounds.
            earlier: the table with their rows, in this run folder or in that of the checkpoint.

        Raises:
            DamagedFile: these rows have changed since the checkpoint was written, or ``earlier`` is no file.
        """
        self.rounds = rounds
        if rounds and earlier.exists():
            if not earlier.is_file():  # a pipe would be waited for without end
                raise DamagedFile(f"{earlier} is no file; remove it to go on without the rows of finished rounds")
            write_whole(self.path, self._text_before(earlier, rounds))
        elif rounds:
            _log.warning(
                "%s begins with round %d: %s has no rows of those before", self.path.name, rounds, earlier.parent
            )

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of a round: column -> value.

        A run may be resumed with more or fewer measures of a user's own. The table keeps the columns of its first row.
        """
        self.rounds = row["round"] + 1
        columns = self._columns()
        append(self.path, csv_of([{name: row.get(name) for name in columns or row}], header=not columns))

    def _columns(self) -> list[str]:
        """The columns of the file; none if it is empty or does not exist."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return next(csv.reader(file), [])

    def state_dict(self) -> dict[str, Any]:
        """Number of rounds, bytes and SHA-256 of the table, with which a resumed run checks its rows."""
        if not self.path.exists():
            return {}
        content = self.path.read_bytes()
        return {"rounds": self.rounds, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, which describes the table when the checkpoint was written."""
        self._at_checkpoint = state

    def _text_before(self, path: Path, rounds: int) -> str:
        """The text of the table with the rows of the first ``rounds`` rounds, checked against the checkpoint."""
        content = path.read_bytes()
        if self._at_checkpoint.get("rounds") == rounds:
            content = content[: self._at_checkpoint["bytes"]]
            if hashlib.sha256(content).hexdigest() != self._at_checkpoint["sha256"]:
                changed = f"its rows of rounds 0 to {rounds - 1} have changed since the checkpoint was written"
                raise DamagedFile(f"{path}: {changed}; put it back, or remove it to go on without these rows")
            return content.decode()
        # A checkpoint of an earlier version, or of the middle of a round, has no digest.
        return csv_of(_rows_before(path, rounds))


def _rows_before(path: Path, round: int) -> list[dict[str, Any]]:
    """The rows of the rounds before ``round``. A last line that a killed process has left incomplete is ignored.

    Raises:
        DamagedFile: rows are missing or repeated, or values are no numbers.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        rows = list(csv.DictReader(io.StringIO(whole.decode("ascii")), strict=True))
        for row in rows:
            for value in row.values():
                float(value or "nan")
        before = [row for row in rows if int(row["round"]) < round]
    except (ValueError, TypeError, KeyError, csv.Error):
        before = []
    if [int(row["round"]) for row in before] != list(range(round)):
        needed = f"a row of numbers for each round from 0 to {round - 1}"
        raise DamagedFile(f"{path} is damaged: it lacks {needed}; without the file the run goes on without these rows")
    return before
