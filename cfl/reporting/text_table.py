"""A table of text, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cfl.runtime.printable import in_markdown, printable

TABLE_WIDTH = 110
"""Least width, in characters, of a printed table, also when it is written to a file or a pipe."""


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        headings: one per column.
        rows: the cells of each row, one per column.
        align: ``l`` for each column of text, ``r`` for each of numbers; empty: the first is text, the others numbers.
        title: one line; empty: none.
        notes: lines that are printed above the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def columns(self) -> str:
        """``l`` or ``r`` for each column."""
        return self.align or "l" + "r" * (len(self.headings) - 1)

    def markdown(self) -> list[str]:
        """Lines: the title as a heading, the notes as quotes, the table."""
        lines = [f"## {in_markdown(self.title)}", ""] if self.title else []
        for note in self.notes:
            lines += [f"> NOTE: {in_markdown(note)}", ""]
        rule = "|" + "".join("---:|" if side == "r" else "---|" for side in self.columns)
        head, *rows = ("| " + " | ".join(map(in_markdown, cells)) + " |" for cells in (self.headings, *self.rows))
        return [*lines, head, rule, *rows]

    def terminal(self, explanation: str = "") -> Table:
        """Return the table for :func:`print_table`, with title and notes above and the explanation below."""
        notes = [f"NOTE: {note}" for note in self.notes]
        shown = Table(
            title=Text(printable("\n".join([self.title, *notes]))),
            title_justify="left",
            title_style="bold",
            caption=Text(explanation) if explanation else None,
            caption_justify="left",
        )
        for heading, side in zip(self.headings, self.columns, strict=True):
            shown.add_column(Text(printable(heading)), justify="right" if side == "r" else "left", no_wrap=True)
        for row in self.rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        return shown


def print_table(table: Table) -> None:
    """Print a table in full: at least :data:`TABLE_WIDTH` characters wide and never cut off, also into a pipe."""
    console = Console()
    needed = Console(width=10_000).measure(table).maximum
    console.width = max(TABLE_WIDTH, needed)
    console.print(table)
