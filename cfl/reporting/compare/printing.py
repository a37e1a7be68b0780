"""Printing tables in full."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 110
"""Least width, in characters, of a printed table, also when it is written to a file or a pipe."""


def print_table(table: Table, file: IO[str] | None = None) -> None:
    """Print a table in full: at least :data:`TABLE_WIDTH` characters wide and never cut off, also into a pipe.

    Args:
        table: any table.
        file: where to; None is standard output.
    """
    console = Console(file=file)
    needed = Console(file=file, width=10_000).measure(table).maximum
    console.width = max(TABLE_WIDTH, needed)
    console.print(table)
