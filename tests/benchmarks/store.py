"""The results file: a list of rows, complete at every moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import REQUIRED, Row
from cfl.runtime.errors import ConfigError


def stored_rows(path: Path) -> list[Row]:
    """Rows of earlier measurements; none if there is no file.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
        check_rows(rows)
    except ValueError as error:
        valid = f"a folder whose bench.json was written by make bench, or none ({error})"
        raise ConfigError("BENCH", str(path), valid) from error
    kept: list[Row] = rows
    return kept


def check_rows(rows: object) -> None:
    """Refuse what is not a list of rows.

    Raises:
        ValueError: naming the first mistake.
    """
    if not isinstance(rows, list):
        raise ValueError("not a list of rows")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no object")
        lacking = [key for key in REQUIRED if key not in row]
        if lacking:
            raise ValueError(f"row {number} lacks {', '.join(lacking)}")
        for key in REQUIRED:
            kinds = str if key in ("work", "engine") else int | float | None
            if isinstance(row[key], bool) or not isinstance(row[key], kinds):
                raise ValueError(f"row {number} has {key} = {row[key]!r}")


def replace_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace all earlier rows of the same works in the file; other works' rows stay.

    The file is replaced in one step, so it is complete at every moment.

    Raises:
        ConfigError: as :func:`stored_rows`.
        ValueError: as :func:`check_rows`.
    """
    check_rows(list(rows))
    works = {row["work"] for row in rows}
    kept = [row for row in stored_rows(path) if row["work"] not in works]
    merged = sorted([*kept, *rows], key=lambda row: row["work"])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(merged, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)
