"""What a comparison writes beside its page: a report in Markdown, and its numbers as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cfl.reporting.compare.groups import Comparison, Row, figure_of
from cfl.reporting.compare.reading import LeftOut
from cfl.reporting.compare.tables import caption, numbers_of, targets
from cfl.reporting.csv_file import csv_text
from cfl.reporting.measures import FIGURES
from cfl.reporting.run_folder import SUMMARY_KEYS
from cfl.reporting.text_table import TextTable
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.printable import in_markdown


def markdown_report(
    tables: Sequence[TextTable], left_out: Sequence[LeftOut], warnings: Sequence[str], pictures: Sequence[str] = ()
) -> str:
    """All tables with their explanation, what is left out, and pictures by file names relative to the text."""
    parts = [
        "# Comparison of runs\n",
        *("\n".join(table.markdown()) + "\n" for table in tables),
        caption(tables) + "\n",
    ]
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
    write_whole(path, csv_text(header, [[row[key] for key in header] for row in rows]))


def write_means_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A line per table, row and figure: mean, sample standard deviation, number of seeds, mean rank."""
    header = ["table", "row", "figure", "mean", "std", "seeds", "rank"]
    rows = [
        [table.title, table.rows[k].label, figure.key, spread.mean, spread.std, spread.count, rank]
        for table in comparisons
        for k, figure, spread, rank, _ in numbers_of(table)
    ]
    write_whole(path, csv_text(header, rows))


def write_differences_csv(path: Path, comparisons: Sequence[tuple[Comparison, Row | None]]) -> None:
    """A line per table, row and figure: mean paired difference to the baseline, its interval, number of seeds."""
    header = ["table", "row", "baseline", "figure", "difference", "low", "high", "seeds"]
    rows = [
        [table.title, table.rows[k].label, baseline.label, figure.key, found.mean, found.low, found.high, found.count]
        for table, baseline in comparisons
        if baseline is not None
        for k, figure, _, _, found in sorted(numbers_of(table, baseline), key=lambda numbers: numbers.row)
        if found is not None
    ]
    write_whole(path, csv_text(header, rows))
