"""Comparing runs at a reduced scale with published numbers: by the order of the methods, never by value."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cfl.papers.cells import Cell
from cfl.papers.definition import Table
from cfl.reporting.compare.statistics import Spread, ranks


@dataclass(frozen=True)
class OrderComparison:
    """The values along one axis at one place of a table, by one figure, ours beside the paper's.

    Attributes:
        place: the other axes' values.
        figure: the column.
        values: along the axis, those that both have; in the table's order.
        ours: mean per value.
        paper: published mean per value.
        leader: the value that leads in the paper's conclusions.
        reference: the value it is measured against.
        lowest_leads: whether the lowest value is the best.
        seeds: over which ours are means: those that all of them have; None where there is none, and each is a mean over
            its own.
    """

    place: Mapping[str, str]
    figure: str
    values: Sequence[str]
    ours: Mapping[str, float]
    paper: Mapping[str, float]
    leader: str
    reference: str
    lowest_leads: bool = False
    seeds: int | None = None

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation; None for fewer than three values, where it could only be 1 or -1."""
        if len(self.values) < 3:
            return None
        return rank_correlation([self.ours[v] for v in self.values], [self.paper[v] for v in self.values])

    @property
    def leads(self) -> bool | None:
        """Whether the leader is better than all others here; None where it has not been run, or nothing else has."""
        return self._leads(self.ours)

    @property
    def leads_in_paper(self) -> bool | None:
        """The same of the published numbers of what has been run: bounds, say, may be above the paper's own method."""
        return self._leads(self.paper)

    def _leads(self, means: Mapping[str, float]) -> bool | None:
        others = [means[v] for v in self.values if v != self.leader]
        if self.leader not in means or not others:
            return None
        return means[self.leader] < min(others) if self.lowest_leads else means[self.leader] > max(others)

    @property
    def gap(self) -> tuple[float, float] | None:
        """Leader minus reference: ours, the paper's. None where one of them has not been run."""
        if not {self.leader, self.reference} <= set(self.ours):
            return None
        return self.ours[self.leader] - self.ours[self.reference], self.paper[self.leader] - self.paper[self.reference]


def compare_orders(table: Table, cells: Sequence[Cell]) -> list[OrderComparison]:
    """One comparison per figure for each combination of the other axes' values of which at least two have been run.

    Compared are means over the seeds that all of them have. A cell of which some seed has no value is left out, and so
    are bounds.
    """
    order = table.order
    if order is None:
        return []
    groups: dict[tuple[tuple[str, ...], str], dict[str, tuple[Cell, float]]] = {}
    others = [axis for axis in table.axes if axis != order.axis]
    for cell in cells:
        value = cell.point[order.axis]
        if cell.figure not in order.figures or value in order.bounds or cell.ours is None or cell.without:
            continue
        published = table.order_number(cell.point, cell.figure)
        if published is not None:
            place = tuple(cell.point[axis] for axis in others)
            groups.setdefault((place, cell.figure), {})[value] = (cell, published)
    found = []
    for (place, figure), group in groups.items():
        if len(group) < 2:
            continue
        common = set.intersection(*(set(cell.seeds) for cell, _ in group.values()))
        ours = {}
        for value, (cell, _) in group.items():
            spread = Spread.of([cell.seeds[seed] for seed in sorted(common or cell.seeds)])
            assert spread is not None
            ours[value] = spread.mean
        found.append(
            OrderComparison(
                place=dict(zip(others, place, strict=True)),
                figure=figure,
                values=list(group),
                ours=ours,
                paper={value: published for value, (_, published) in group.items()},
                leader=order.leader,
                reference=order.reference,
                lowest_leads=order.lowest_leads(figure),
                seeds=len(common) or None,
            )
        )
    return found


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation in [-1, 1], ties at their mean rank; None where all values of one side are equal."""
    try:
        return statistics.correlation(ranks(left), ranks(right))
    except statistics.StatisticsError:
        return None
