"""The tables of a comparison as rows of text, before they are printed or written in some format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cfl.reporting.compare.rows import Comparison, Row, own_measures
from cfl.reporting.compare.statistics import LEVEL, Difference, Spread, mean_ranks, paired_difference
from cfl.reporting.measures import Figure, figures_with
from cfl.reporting.rounding import rounded
from cfl.reporting.text_table import TextTable

MISSING = "-"


def caption(tables: Sequence[TextTable] | None = None, comparisons: Sequence[Comparison] = ()) -> str:
    """Return a caption that explains the columns of the tables of comparisons; None explains all possible columns."""
    shown = None if tables is None else {heading for table in tables for heading in table.headings}
    printed = [figure for figure in figures_with(own_measures(comparisons)) if figure.printed]
    figures = [figure for figure in printed if shown is None or figure.heading in shown]
    said = "; ".join(f"{figure.heading}: {figure.meaning}" for figure in figures)
    return f"Mean over seeds, ± sample standard deviation. {said}."


class Numbers(NamedTuple):
    """Statistics of one figure over the seeds of one row.

    Attributes:
        row: index of the row.
        figure: the figure.
        spread: mean and deviation.
        rank: mean rank among the rows; None where :func:`ranks` is None.
        difference: paired difference to the baseline; None for the baseline itself, and without common seeds.
    """

    row: int
    figure: Figure
    spread: Spread
    rank: float | None
    difference: Difference | None


def numbers_of(comparison: Comparison, baseline: Row | None = None) -> list[Numbers]:
    """All numbers of a table, figure by figure."""
    found = []
    for figure in figures_of(comparison):
        places = ranks(comparison, figure)
        theirs = baseline.figure(figure) if baseline is not None else {}
        for k, row in enumerate(comparison.rows):
            values = row.figure(figure)
            if (spread := Spread.of([*values.values()])) is not None:
                difference = paired_difference(values, theirs) if row is not baseline else None
                found.append(Numbers(k, figure, spread, places[k] if places else None, difference))
    return found


def figures_of(comparison: Comparison) -> list[Figure]:
    """Return the figures that at least one row of a table has."""
    figures = figures_with(own_measures([comparison]))
    return [figure for figure in figures if any(row.figure(figure) for row in comparison.rows)]


def printed_figures_of(comparison: Comparison) -> list[Figure]:
    """Return the figures of :func:`figures_of` that are columns of printed tables."""
    return [figure for figure in figures_of(comparison) if figure.printed]


def mean_text(values: Sequence[float], figure: Figure) -> str:
    """A figure's mean and deviation over seeds in its unit, ``81.25 ± 0.40``."""
    spread = Spread.of(values)
    return spread.shown(figure.decimals, "+," if figure.signed else ",", figure.divisor) if spread else MISSING


def figure_text(row: Row, figure: Figure) -> str:
    """Return a row's figure as :func:`mean_text`, followed by the number of seeds with it if not all have it."""
    values = [*row.figure(figure).values()]
    return mean_text(values, figure) + of_seeds(len(values), len(row.seeds))


def of_seeds(count: int, seeds: int) -> str:
    """Return `` (2 of 4)``, to follow a number that not all seeds have; empty if all or none have it."""
    return "" if count in (0, seeds) else f" ({count} of {seeds})"


def difference_text(difference: Difference | None, figure: Figure) -> str:
    """Return a difference as text, ``+3.10 [+1.20, +5.00]``, without interval for a single seed."""
    if difference is None:
        return MISSING
    numbers = [value for value in (difference.mean, difference.low, difference.high) if value is not None]
    mean, *interval = (rounded(value / figure.divisor, figure.decimals, "+,") for value in numbers)
    return f"{mean} [{', '.join(interval)}]" if interval else mean


def targets(comparison: Comparison) -> list[str]:
    """The target accuracies of any of the runs in percent, lowest first."""
    runs = [reading.run for row in comparison.rows for reading in row.readings]
    return sorted({name for run in runs for name in run.rounds_to_accuracy}, key=float)


def rounds_text(row: Row, target: str) -> str:
    """Return the mean rounds until ACC first reached a target, with the number of seeds that did if not all did.

    If none did, it is ``> R`` with the rounds R of the longest run.
    """
    reached = row.by_seed(lambda reading: reading.run.rounds_to(target))
    curves = row.with_curves("accuracy")
    tried = [r.run for r in row.readings if r.run in curves or target in r.run.rounds_to_accuracy]
    if not reached:
        return f"> {max(run.rounds for run in tried):,}" if tried else MISSING
    text = mean_text([*reached.values()], _ROUNDS if len(reached) == 1 else _MEAN_ROUNDS)
    seeds = {run.seed for run in tried}
    return text + of_seeds(len(reached), len(seeds))


_ROUNDS = Figure("rounds", "rounds", "", "lower", 0)
_MEAN_ROUNDS = Figure("rounds", "rounds", "", "lower", 1)


def ranks(comparison: Comparison, figure: Figure) -> list[float] | None:
    """Return each row's mean rank; None for a figure without a better side, a single row, or no common seed."""
    if figure.better is None or len(comparison.rows) < 2:
        return None
    return mean_ranks([row.figure(figure) for row in comparison.rows], figure.better == "higher")


def rank_text(rank: float) -> str:
    """A mean rank with as many decimals as it needs, two at most."""
    return rounded(rank, 2).rstrip("0").rstrip(".")


def means_table(comparison: Comparison) -> TextTable:
    """Return the table of means: a line per row with number of seeds, figures, rounds to targets and rank.

    A figure is mean and deviation, with the number of seeds if not all have it. The rank is by the first figure.
    """
    figures = printed_figures_of(comparison)
    aims, by_accuracy = targets(comparison), ranks(comparison, figures[0]) if figures else None
    several = any(len(row.seeds) > 1 for row in comparison.rows)
    headings = ["method", *(["seeds"] if several else []), *(figure.heading for figure in figures)]
    headings += [f"rounds to {name} %" for name in aims] + (["rank"] if by_accuracy else [])
    rows = []
    for k, row in enumerate(comparison.rows):
        cells = [row.label, *([str(len(row.seeds))] if several else [])]
        cells += [figure_text(row, figure) for figure in figures]
        cells += [rounds_text(row, name) for name in aims]
        cells += [rank_text(by_accuracy[k])] if by_accuracy else []
        rows.append(cells)
    return TextTable(headings, rows, title=comparison.title, notes=comparison.notes)


def differences_table(comparison: Comparison, baseline: Row | None) -> TextTable | None:
    """Return the table of differences: for every other row, paired differences to the baseline with their interval.

    Returns:
        None without a baseline, or if no row has two seeds in common with it, because there is no interval then.
    """
    if baseline is None:
        return None
    figures = [figure for figure in printed_figures_of(comparison) if baseline.figure(figure)]
    rows = []
    for row in comparison.rows:
        common = set(row.seeds) & set(baseline.seeds)
        if row is not baseline and len(common) > 1:
            found = [paired_difference(row.figure(figure), baseline.figure(figure)) for figure in figures]
            cells = [
                difference_text(one, figure) + of_seeds(one.count if one else 0, len(common))
                for one, figure in zip(found, figures, strict=True)
            ]
            rows.append([row.label, str(len(common)), *cells])
    if not rows:
        return None
    told = f"difference to {baseline.label} on common seeds, {LEVEL:.0%} confidence interval of its mean"
    headings = ["method", "seeds", *(figure.heading for figure in figures)]
    return TextTable(headings, rows, title=f"{comparison.title}: {told}")
