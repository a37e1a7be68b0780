"""Write a comparison as a report in Markdown and its numbers as CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from cfl.reporting.compare.reading import LeftOut
from cfl.reporting.compare.rows import Compared, Comparison, figure_of, own_measures
from cfl.reporting.compare.tables import caption, difference_text, mean_text, numbers_of, targets
from cfl.reporting.csv_file import csv_text
from cfl.reporting.measures import figures_with
from cfl.reporting.summary_file import SUMMARY_KEYS
from cfl.reporting.text_table import TextTable
from cfl.runtime.atomic_write import write_whole
from cfl.runtime.printable import in_markdown


def markdown_report(
    tables: Sequence[TextTable],
    comparisons: Sequence[Comparison],
    left_out: Sequence[LeftOut],
    warnings: Sequence[str],
    pictures: Sequence[str] = (),
) -> str:
    """Return a report of all tables, their caption, what was not compared, and links to picture files."""
    parts = [
        "# Comparison of runs\n",
        *("\n".join(table.markdown()) + "\n" for table in tables),
        caption(tables, comparisons) + "\n",
    ]
    told = [*(f"{one.folder}: {one.reason}" for one in left_out), *warnings]
    if told:
        parts.append("\n".join(["## Not compared", "", *(f"- {in_markdown(line)}" for line in told)]) + "\n")
    for stem, of_stem in groupby(pictures, key=lambda file: Path(file).stem):
        files = list(of_stem)
        shown = next((file for file in files if file.endswith((".png", ".svg"))), None)  # Markdown does not show PDFs
        parts.append(f"{'!' if shown else ''}[{stem.replace('_', ' ')}]({shown or files[0]})\n")
    return "\n".join(parts)


def write_runs_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a line per run with every figure unrounded, bytes as bytes; an empty cell is an undefined value."""
    aims = sorted({name for comparison in comparisons for name in targets(comparison)}, key=float)
    figures = [figure.key for figure in figures_with(own_measures(comparisons))]
    keys = dict.fromkeys([*SUMMARY_KEYS, *figures])
    rows = []
    for comparison in comparisons:
        for row in comparison.rows:
            for reading in row.readings:
                run = reading.run
                values: dict[str, Any] = {"table": comparison.title, "row": row.label}
                values |= {key: getattr(run, key) for key in SUMMARY_KEYS}
                values |= {key: figure_of(reading, key) for key in figures}  # some runs stopped before
                values |= {f"rounds_to_{name}": run.rounds_to(name) for name in aims}
                rows.append(values | {"folder": run.folder})
    header = ["table", "row", *keys, *(f"rounds_to_{name}" for name in aims), "folder"]
    write_whole(path, csv_text(header, [[row[key] for key in header] for row in rows]))


def write_means_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a line per table, row and figure: mean, sample standard deviation, number of seeds, mean rank.

    The column ``shown`` has mean and deviation as in tables, rounded and in the figure's unit.
    """
    header = ["table", "row", "figure", "mean", "std", "seeds", "rank", "shown"]
    rows = []
    for table in comparisons:
        for k, figure, spread, rank, _ in numbers_of(table):
            row = table.rows[k]
            text = mean_text([*row.figure(figure).values()], figure)
            rows.append([table.title, row.label, figure.key, spread.mean, spread.std, spread.count, rank, text])
    write_whole(path, csv_text(header, rows))


def write_differences_csv(path: Path, comparisons: Compared) -> None:
    """Write a line per table, row and figure: mean paired difference to the baseline, its interval, number of seeds.

    The column ``shown`` has difference and interval as in tables.
    """
    header = ["table", "row", "baseline", "figure", "difference", "low", "high", "seeds", "shown"]
    rows: list[list[Any]] = []
    for table, baseline in comparisons:
        if baseline is None:
            continue
        for k, figure, _, _, found in sorted(numbers_of(table, baseline), key=lambda numbers: numbers.row):
            if found is not None:
                numbers = [found.mean, found.low, found.high, found.count, difference_text(found, figure)]
                rows.append([table.title, table.rows[k].label, baseline.label, figure.key, *numbers])
    write_whole(path, csv_text(header, rows))
