"""Tables as Markdown, LaTeX and CSV, and for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from cfl.reporting.compare.groups import Comparison, Row, figure_of
from cfl.reporting.compare.reading import LeftOut
from cfl.reporting.compare.statistics import Spread, paired_difference
from cfl.reporting.compare.tables import TextTable, caption, figures_of, ranks, targets
from cfl.reporting.measures import FIGURES
from cfl.reporting.run_folder import SUMMARY_KEYS
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.printable import in_markdown, on_one_line, printable

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}
_IN_MATHS = {"±": r" \pm ", "> ": ">"}


def terminal_table(table: TextTable, explanation: str = "") -> Table:
    """For :func:`cfl.reporting.compare.printing.print_table`: title and notes above, the explanation below."""
    notes = [f"NOTE: {note}" for note in table.notes]
    shown = Table(
        title=Text(printable("\n".join([table.title, *notes]))),
        title_justify="left",
        title_style="bold",
        caption=Text(explanation) if explanation else None,
        caption_justify="left",
    )
    for k, heading in enumerate(table.headings):
        shown.add_column(Text(printable(heading)), justify="right" if k else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def markdown_table(table: TextTable) -> str:
    """A heading, the notes as quotes, the table."""
    lines = [f"## {in_markdown(table.title)}", ""]
    for note in table.notes:
        lines += [f"> NOTE: {in_markdown(note)}", ""]
    lines += [_markdown_row(table.headings), "|---" + "|---:" * (len(table.headings) - 1) + "|"]
    return "\n".join([*lines, *map(_markdown_row, table.rows)]) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(in_markdown, cells)) + " |"


def latex_table(table: TextTable) -> str:
    """A ``table`` with the rules of the package booktabs; the notes are comments."""
    lines = [f"% {on_one_line(note)}" for note in table.notes]
    lines += [r"\begin{table}", r"\centering", rf"\caption{{{_latex(table.title)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(table.headings) - 1)}}}", r"\toprule"]
    lines += [" & ".join(map(_latex, table.headings)) + r" \\", r"\midrule"]
    lines += [" & ".join([_latex(row[0]), *map(_latex_number, row[1:])]) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


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


def markdown_report(
    tables: Sequence[TextTable], left_out: Sequence[LeftOut], warnings: Sequence[str], pictures: Sequence[str] = ()
) -> str:
    """All tables with their explanation, what is left out, and pictures by file names relative to the text."""
    parts = ["# Comparison of runs\n", *map(markdown_table, tables), caption(tables) + "\n"]
    told = [*(f"{one.folder}: {one.reason}" for one in left_out), *warnings]
    if told:
        parts.append("\n".join(["## Not compared", "", *(f"- {in_markdown(line)}" for line in told)]) + "\n")
    parts += [f"![{Path(picture).stem.replace('_', ' ')}]({picture})\n" for picture in pictures]
    return "\n".join(parts)


def write_runs_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A line per run with every figure unrounded, bytes as bytes; an empty cell is an undefined value."""
    aims = sorted({name for comparison in comparisons for name in targets(comparison)}, key=float)
    extra = [figure.key for figure in FIGURES if figure.key not in SUMMARY_KEYS]
    keys = [*SUMMARY_KEYS, *extra]
    rows = []
    for comparison in comparisons:
        for row in comparison.rows:
            for reading in row.readings:
                run = reading.run
                values: dict[str, Any] = {"table": comparison.title, "row": row.label}
                values |= {key: getattr(run, key) for key in SUMMARY_KEYS}
                values |= {key: figure_of(reading, key) for key in extra}
                values |= {f"rounds_to_{name}": run.rounds_to(name) for name in aims}
                rows.append(values | {"folder": run.folder})
    header = ["table", "row", *keys, *(f"rounds_to_{name}" for name in aims), "folder"]
    _write(path, header, rows)


def write_means_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A line per table, row and figure: mean, sample standard deviation, number of seeds, mean rank."""
    rows: list[dict[str, Any]] = []
    for comparison in comparisons:
        for figure in figures_of(comparison):
            places = ranks(comparison, figure)
            for k, row in enumerate(comparison.rows):
                spread = Spread.of(list(row.figure(figure).values()))
                if spread is not None:
                    rows.append(
                        {"table": comparison.title, "row": row.label, "figure": figure.key}
                        | {"mean": spread.mean, "std": spread.std, "seeds": spread.count}
                        | {"rank": places[k] if places else None}
                    )
    _write(path, ["table", "row", "figure", "mean", "std", "seeds", "rank"], rows)


def write_differences_csv(path: Path, comparisons: Sequence[tuple[Comparison, Row | None]]) -> None:
    """A line per table, row and figure: mean paired difference to the baseline, its interval, number of seeds."""
    rows: list[dict[str, Any]] = []
    for comparison, baseline in comparisons:
        figures = figures_of(comparison)
        for row in comparison.rows:
            for figure in figures:
                found = paired_difference(row.figure(figure), baseline.figure(figure)) if baseline else None
                if baseline is not None and row is not baseline and found is not None:
                    rows.append(
                        {"table": comparison.title, "row": row.label, "baseline": baseline.label, "figure": figure.key}
                        | {"difference": found.mean, "low": found.low, "high": found.high, "seeds": found.count}
                    )
    _write(path, ["table", "row", "baseline", "figure", "difference", "low", "high", "seeds"], rows)


def _write(path: Path, header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if row[key] is None else row[key] for key in header] for row in rows])
    write_whole(path, file.getvalue())
