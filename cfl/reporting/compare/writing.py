"""What a comparison writes beside its page: a report in Markdown, and its numbers as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cfl.reporting.compare.groups import Comparison, Row, figure_of
from cfl.reporting.compare.reading import LeftOut
from cfl.reporting.compare.statistics import Spread, paired_difference
from cfl.reporting.compare.tables import caption, figures_of, ranks, targets
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
    write_whole(path, csv_text(header, [[row[key] for key in header] for row in rows]))
