"""A table as text, and what writes it: for the terminal, as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cfl.runtime.printable import in_markdown, on_one_line, printable

TABLE_WIDTH = 110
"""Least width, in characters, of a printed table, also when it is written to a file or a pipe."""

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}
_IN_MATHS = {"±": r" \pm ", "> ": ">"}


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        headings: of all columns.
        rows: cells as text, as many as headings each.
        align: ``l`` for each column of text, ``r`` for each of numbers; empty: the first is text, the others numbers.
        title: one line; empty: none.
        notes: lines that belong above it.
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

    def latex(self) -> list[str]:
        """Lines: a ``table`` with the rules of the package booktabs; the notes are comments."""
        lines = [f"% {on_one_line(note)}" for note in self.notes]
        lines += [r"\begin{table}", r"\centering", rf"\caption{{{_latex(self.title)}}}"]
        lines += [rf"\begin{{tabular}}{{{self.columns}}}", r"\toprule"]
        lines += [" & ".join(map(_latex, self.headings)) + r" \\", r"\midrule"]
        for row in self.rows:
            cells = zip(row, self.columns, strict=True)
            lines.append(" & ".join(_latex_number(c) if side == "r" else _latex(c) for c, side in cells) + r" \\")
        return [*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]

    def terminal(self, explanation: str = "") -> Table:
        """For :func:`print_table`: title and notes above, the explanation below."""
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


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in on_one_line(text))


def _latex_number(text: str) -> str:
    if not any(character.isdigit() for character in text):
        return "--"
    # In maths a comma between digits would be set as punctuation.
    text = text.replace(",", "{,}").replace("{,} ", ", ")
    for plain, maths in _IN_MATHS.items():
        text = text.replace(plain, maths)
    head, of, tail = text.partition(" (")
    return f"${' '.join(head.split())}$" + (f" ({tail}" if of else "")


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
