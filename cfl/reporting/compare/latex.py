"""A comparison as LaTeX tables that fit one column of an article or both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cfl.metrics.measure import MEASURES, measure_of
from cfl.reporting.compare.groups import on_validation
from cfl.reporting.compare.latex_layout import HEADING, SIZE, SMALL, Column, Layout, layouts, parts_of
from cfl.reporting.compare.rows import Compared, Comparison, Row, own_measures
from cfl.reporting.compare.statistics import LEVEL, Difference, Spread, paired_difference
from cfl.reporting.compare.tables import (
    MISSING,
    figure_text,
    figures_of,
    of_seeds,
    rank_text,
    ranks,
    rounds_text,
    targets,
)
from cfl.reporting.measures import ON_VALIDATION, Figure, figures_with
from cfl.reporting.rounding import rounded
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import in_latex, on_one_line

_PAPER_TABLES = tuple(measure.of_papers for measure in MEASURES)
_SEEDS, _RANK, _ROUNDS_TO = "seeds", "rank", "rounds_to_"
_ARROWS = {"higher": r" $\uparrow$", "lower": r" $\downarrow$", None: ""}
_SEEDS_NAMED = 6  # a caption lists at most so many seeds
_HEAD = r"""% Tables written by cfl compare. The preamble needs \usepackage{booktabs,array}
% table* spans both columns of an article in two columns.
"""


def latex_report(compared: Compared, columns: Sequence[str] = ()) -> str:
    """Return the text of a file for ``\\input`` with all tables of means and of differences.

    Args:
        compared: the tables, each with the row against which its differences are taken.
        columns: keys that :func:`check_columns` allows; empty: the usual ones of papers, such as ACC, FGT and BWT.
            Tables that have none of them are left out.
    """
    text, labels = _HEAD, set[str]()
    for comparison, baseline in compared:
        keys = [key for key in columns or _columns_of_papers(comparison) if key in valid_columns([comparison])]
        text += "".join(f"% {on_one_line(note)}\n" for note in comparison.notes)
        if not keys:
            text += f"% {on_one_line(comparison.title)}: no such columns\n"
            continue
        name = re.sub("[^a-z0-9]+", "-", comparison.title.lower()).strip("-") or "runs"
        blocks = [(name, _means(comparison, keys), _about_means(comparison, keys))]
        if baseline is not None and (differences := _differences(comparison, baseline, keys)):
            blocks.append((f"{name}-differences", differences, _about_differences(comparison, baseline)))
        for label, table, about in blocks:
            text += "\n".join(_floats(table, about, _unused(f"tab:{label}", labels))) + "\n"
    return text


def valid_columns(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the keys of all columns that at least one of the tables can have."""
    comparisons = list(comparisons)
    figures = {figure.key for comparison in comparisons for figure in figures_of(comparison)}
    aims = sorted({name for comparison in comparisons for name in targets(comparison)}, key=float)
    keys = [figure.key for figure in figures_with(own_measures(comparisons)) if figure.key in figures]
    return [*keys, *(f"{_ROUNDS_TO}{name}" for name in aims), _SEEDS, _RANK]


def check_columns(columns: Sequence[str], comparisons: Sequence[Comparison]) -> None:
    """Refuse a column that no table has.

    Raises:
        ConfigError: names the column, and the valid ones.
    """
    valid = valid_columns(comparisons)
    for key in columns:
        if key not in valid:
            raise ConfigError("--columns", key, f"some of {', '.join(valid)}, with commas between them")


def _columns_of_papers(comparison: Comparison) -> list[str]:
    figures = figures_of(comparison)
    there = [figure.key for figure in figures]
    rows = [{figure.key for figure in figures if row.figure(figure)} for row in comparison.rows]
    groups = [next((group for group in _PAPER_TABLES if row & {*group}), ()) for row in rows]
    return [key for group in _PAPER_TABLES if group in groups for key in group if key in there]


@dataclass(frozen=True)
class _Table:
    """A table before it is laid out.

    Attributes:
        names: names of the rows, as plain text.
        columns: the columns of numbers.
    """

    names: Sequence[str]
    columns: Sequence[Column]


def _means(comparison: Comparison, keys: Sequence[str]) -> _Table:
    rows = comparison.rows
    if len({tuple(row.seeds) for row in rows}) > 1 and _SEEDS not in keys:
        keys = [_SEEDS, *keys]
    columns, figures = [], {figure.key: figure for figure in figures_of(comparison)}
    for key in keys:
        if key == _SEEDS:
            columns.append(Column("seeds", [_cell(str(len(row.seeds))) for row in rows]))
        elif key == _RANK:
            columns.append(Column("rank", [_cell(text) for text in _rank_texts(comparison)]))
        elif key.startswith(_ROUNDS_TO):
            aim = key.removeprefix(_ROUNDS_TO)
            columns.append(Column(f"rounds to {in_latex(aim)}\\,\\%", [_cell(rounds_text(row, aim)) for row in rows]))
        else:
            columns.append(_figure_column(rows, figures[key]))
    return _Table([row.label for row in rows], columns)


def _rank_texts(comparison: Comparison) -> list[str]:
    figures = figures_of(comparison)
    found = ranks(comparison, figures[0]) if figures else None
    return [rank_text(rank) for rank in found] if found else [MISSING for _ in comparison.rows]


def _figure_column(rows: Sequence[Row], figure: Figure) -> Column:
    best = _best_of([Spread.of([*row.figure(figure).values()]) for row in rows], figure)
    return Column(_heading(figure), [_cell(figure_text(row, figure), bold=k in best) for k, row in enumerate(rows)])


def _best_of(spreads: Sequence[Spread | None], figure: Figure) -> set[int]:
    """Return the places of the best mean after rounding, several if equal; empty if all rounded means are equal."""
    shown = {
        k: float(rounded(spread.mean / figure.divisor, figure.decimals)) for k, spread in enumerate(spreads) if spread
    }
    if figure.better is None or len({*shown.values()}) < 2:
        return set()
    best = max(shown.values()) if figure.better == "higher" else min(shown.values())
    return {k for k, value in shown.items() if value == best}


def _heading(figure: Figure) -> str:
    return in_latex(figure.heading) + _ARROWS[figure.better]


def _differences(comparison: Comparison, baseline: Row, keys: Sequence[str]) -> _Table | None:
    common = {row.label: {*row.seeds} & {*baseline.seeds} for row in comparison.rows if row is not baseline}
    rows = [row for row in comparison.rows if len(common.get(row.label, ())) > 1]
    figures = [figure for figure in figures_of(comparison) if figure.key in keys and baseline.figure(figure)]
    if not rows or not figures:
        return None
    sizes = [len(common[row.label]) for row in rows]
    columns = []
    for figure in sorted(figures, key=lambda figure: keys.index(figure.key)):
        found = [paired_difference(row.figure(figure), baseline.figure(figure)) for row in rows]
        means = [
            _cell(_shown(one.mean, figure, "+") + of_seeds(one.count, size) if one else MISSING)
            for one, size in zip(found, sizes, strict=True)
        ]
        columns.append(Column(_heading(figure), means, [_interval(one, figure) for one in found]))
    return _Table([row.label for row in rows], columns)


def _shown(value: float, figure: Figure, style: str = "") -> str:
    return rounded(value / figure.divisor, figure.decimals, f"{style},")


def _interval(found: Difference | None, figure: Figure) -> str:
    if found is None or found.low is None or found.high is None:
        return ""
    return f"[{', '.join(_cell(_shown(value, figure)) for value in (found.low, found.high))}]"


def _cell(text: str, bold: bool = False) -> str:
    """Return a number in maths mode with its deviation, and after it the count of seeds, if any."""
    if not any(character.isdigit() for character in text):
        return "--"
    number, of, tail = text.partition(" (")
    mean, pm, deviation = number.replace(",", "{,}").replace("> ", ">").partition(" ± ")
    mean = rf"\mathbf{{{mean}}}" if bold else mean
    return (f"${mean} \\pm {deviation}$" if pm else f"${mean}$") + (f" ({tail}" if of else "")


def _about_means(comparison: Comparison, keys: Sequence[str]) -> str:
    several = any(len(row.seeds) > 1 for row in comparison.rows)
    told = "Means $\\pm$ sample standard deviations over seeds" if several else "Results of one seed"
    bold = ", best in bold" if len(comparison.rows) > 1 else ""
    shown = [figure for figure in figures_of(comparison) if figure.key in keys]
    meanings = "; ".join(f"{in_latex(figure.heading)}: {in_latex(figure.meaning)}" for figure in shown)
    return f"{told}{bold}. {_about(comparison)}{f' {meanings}.' if meanings else ''}"


def _about_differences(comparison: Comparison, baseline: Row) -> str:
    told = f"Differences to {in_latex(baseline.label)} on common seeds"
    return f"{told}, with the {LEVEL * 100:g}\\,\\% confidence interval of their mean. {_about(comparison)}"


def _about(comparison: Comparison) -> str:
    """Benchmark, partition, scenario, tasks, clients and seeds."""
    readings = [reading for row in comparison.rows for reading in row.readings]
    runs = [reading.run for reading in readings]

    def values(value: Callable[..., object]) -> str:
        return ", ".join(in_latex(str(one)) for one in dict.fromkeys(value(run) for run in runs))

    seeds = sorted({run.seed for run in runs})
    scenario = values(lambda run: measure_of(run.scenario).scenario_in_words(run.scenario))
    samples = f", {ON_VALIDATION}" * any(map(on_validation, readings))
    return (
        f"Benchmark {values(lambda run: run.benchmark)}, partition {values(lambda run: run.partition)}, "
        f"{scenario}{samples}, "
        f"{values(lambda run: run.tasks)} tasks, {values(lambda run: run.clients)} clients, {_seeds_text(seeds)}."
    )


def _seeds_text(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) > _SEEDS_NAMED:
        in_a_row = all(after - before == 1 for before, after in pairwise(seeds))
        return f"seeds {seeds[0]} to {seeds[-1]}" if in_a_row else f"{len(seeds)} seeds"
    return f"seeds {', '.join(map(str, seeds))}"


def _unused(label: str, labels: set[str]) -> str:
    number, found = 1, label
    while found in labels:
        number += 1
        found = f"{label}-{number}"
    labels.add(found)
    return found


def _floats(table: _Table, about: str, label: str) -> Iterator[str]:
    """Yield the lines of a table as one float, or as several if its rows do not fit on a page."""
    found = layouts(table.names, table.columns)
    parts = list(parts_of(table.names, table.columns, found))
    for number, places in enumerate(parts):
        environment = "table*" if any(layout.wide for layout in found) else "table"
        yield rf"\begin{{{environment}}}"
        yield rf"\centering{SIZE}"
        continued = f" (continued, {number + 1} of {len(parts)})" if number else ""
        yield rf"\caption{{{about}{continued}}}"
        yield rf"\label{{{label}{f'-part-{number + 1}' if number else ''}}}"
        yield r"\smallskip"
        for k, layout in enumerate(found):
            yield from _tabular(table, layout, places)
            if k < len(found) - 1:
                yield r"\par\medskip"
        yield rf"\end{{{environment}}}"
        yield ""


def _tabular(table: _Table, layout: Layout, places: Sequence[int]) -> Iterator[str]:
    columns = [table.columns[k] for k in layout.columns]
    yield rf"\begin{{tabular}}{{@{{}}{layout.name_column}{'r' * len(columns)}@{{}}}}"
    yield r"\toprule"
    yield " & ".join([HEADING, *(column.heading for column in columns)]) + r" \\"
    yield r"\midrule"
    for place in places:
        yield " & ".join([in_latex(table.names[place]), *(column.cells[place] for column in columns)]) + r" \\"
        if any(below := [column.below[place] if column.below else "" for column in columns]):
            yield " & ".join(["", *(f"{SMALL} {text}" if text else "" for text in below)]) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"
