"""Write the page on how far each published number was reproduced, from the kept runs alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from cfl.papers.cells import Cell, Experiments
from cfl.papers.definition import Paper, Table
from cfl.papers.kept import RESULTS, read_kept
from cfl.papers.orders import compare_orders
from cfl.papers.report import cell_table, counts, note_list, order_table, remarks, tolerances
from cfl.papers.results import Result, Results
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import TextTable
from cfl.running.missing_data import MISSING, MissingData
from cfl.running.resolving import Resolver

HEAD = """# State of every cell

Written by `python -m cfl.papers reproducibility` from the kept runs in `cfl/papers/*/results`. Every cell of the
papers' tables has a row, and one more for runs at another scale. `docs/reproducibility.md` says how cells are judged,
`docs/tables.md` how the runs are made.
"""


def page(papers: Sequence[Paper], resolver: Resolver, folders: Mapping[str, Path] | None = None) -> str:
    """The whole page.

    Args:
        papers: all papers.
        resolver: resolves the tables' configurations.
        folders: paper -> folder of its kept runs; None takes each paper's ``results``.
    """
    overview: list[list[str]] = []
    lines: list[str] = []
    for paper in papers:
        folder = (folders or {}).get(paper.name, paper.folder / RESULTS)
        kept = read_kept(paper, folder)
        missing = MissingData(folder / MISSING)
        asked = {scale: results for scale, results in kept.items() if results or scale == paper.published_scale}
        known = {scale: Experiments(resolver, Results(results), missing) for scale, results in asked.items()}
        lines += [f"## {paper.title}", ""]
        tables = [(t, {scale: known[scale].cells(t, scale) for scale in known}) for t in paper.tables()]
        cells = {table.full_name: _cells(table, by_scale) for table, by_scale in tables}
        lines += _counted("table", [[name, str(len(of)), counts(of)] for name, of in cells.items()])
        every = [*itertools.chain.from_iterable(cells.values())]
        overview.append([paper.title, str(len(every)), counts(every)])
        lines += remarks(paper.notes, every)
        for table, by_scale in tables:
            lines += _section(table, by_scale)
        lines += _runs(paper, kept)
        lines.append("")
    return "\n".join([HEAD, "## Counts", "", *_counted("paper", overview), "", *lines])


def _counted(what: str, rows: Sequence[Sequence[str]]) -> list[str]:
    return TextTable([what, "cells", "status"], rows, "lrl").markdown()


def _cells(table: Table, by_scale: Mapping[str, Sequence[Cell]]) -> list[Cell]:
    """Return each cell once, at one scale.

    This is the first scale at which the cell was run, or the published one if it was never run. If the runs at the
    first scale do not record what the cell needs, a later scale with a value takes its place.
    """
    published = next(iter(by_scale))
    chosen: dict[tuple[str, ...], Cell] = {}
    for scale, cells in by_scale.items():
        for cell in cells:
            key = _key(table, cell)
            before = chosen.get(key)
            if before is None:
                if cell.ran or scale == published:
                    chosen[key] = cell
            elif (cell.ran and not before.ran) or (cell.seeds and not before.is_settled):
                chosen[key] = cell
    return list(chosen.values())


def _rows(table: Table, by_scale: Mapping[str, Sequence[Cell]]) -> list[Cell]:
    """Return the cells, each followed by those with values at other scales, so that all ranked numbers are shown."""
    by_place: dict[tuple[str, ...], list[Cell]] = {}
    for cell in itertools.chain.from_iterable(by_scale.values()):
        if cell.seeds:
            by_place.setdefault(_key(table, cell), []).append(cell)
    rows = []
    for cell in _cells(table, by_scale):
        rows += [cell, *(other for other in by_place.get(_key(table, cell), []) if other is not cell)]
    return rows


def _key(table: Table, cell: Cell) -> tuple[str, ...]:
    return (*table.place(cell.point).values(), cell.figure)


def _section(table: Table, by_scale: Mapping[str, Sequence[Cell]]) -> list[str]:
    notes: list[str] = []
    shown = _rows(table, by_scale)
    lines = ["", f"### {table.full_name}: {table.title}", "", *cell_table(table, shown, notes)]
    lines += tolerances(table, shown)
    for scale, cells in by_scale.items():  # orders use all runs of a scale, also if the chosen cell is of another
        order = order_table(table, compare_orders(table, cells))
        lines += ["", f"Scale `{scale}`:", *order] if order else []
    return lines + note_list(notes) + remarks(table.notes, shown)


def _runs(paper: Paper, kept: Mapping[str, Sequence[Result]]) -> list[str]:
    lines = ["", f"### Runs: {paper.name}", ""]
    if not any(kept.values()):
        return [*lines, "None is kept."]
    described = ("method", "benchmark", "partition")
    heads = [*described, "scale", "seed", "rounds", "seconds", "machine", "cfl, torch, code", "hash"]
    rows = []
    for scale, results in kept.items():
        for result in results:
            figures = result.summary
            versions = figures.get("versions", {})
            code = [f"`{versions['source']}`"] if "source" in versions else []  # older runs do not record it
            row = [
                *(str(figures.get(key, "-")) for key in described),
                scale,
                str(result.seed),
                str(figures.get("rounds", "-")),
                rounded(figures.get("seconds", 0.0), 0),
                f"{figures.get('machine', '-')}, {figures.get('device', '-')}",
                ", ".join([versions.get("cfl", "-"), versions.get("torch", "-"), *code]),
                result.hash,
            ]
            rows.append(row)
    lines += TextTable(heads, rows, "llllrrrlll").markdown()
    return [*lines, "", "Scales: " + "; ".join(f"`{name}`: {text}" for name, text in paper.scales.items()) + "."]
