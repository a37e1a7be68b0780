"""Comparing runs at a reduced scale with published numbers: by the order of the methods, never by value."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cfl.papers.cells import Cell
from cfl.papers.definition import Order, Table
from cfl.reporting.compare.statistics import ranks


@dataclass(frozen=True)
class OrderComparison:
    """Our means and the paper's of one figure for the values of one axis, such as methods.

    Attributes:
        place: values of the other axes.
        figure: the column.
        values: values of the axis with our mean and a published one, in the table's order.
        ours: our mean for each value.
        paper: the published mean for each value.
        order: the table's order, with leader and reference.
        seeds: number of seeds that all values have; our means are over these. None if there is no common seed; then
            each mean is over its own seeds.
    """

    place: Mapping[str, str]
    figure: str
    values: Sequence[str]
    ours: Mapping[str, float]
    paper: Mapping[str, float]
    order: Order
    seeds: int | None = None

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation; None for fewer than three values, where it could only be 1 or -1."""
        if len(self.values) < 3:
            return None
        return rank_correlation([self.ours[v] for v in self.values], [self.paper[v] for v in self.values])

    @property
    def leads(self) -> bool | None:
        """Whether the leader is better than all others in our runs; None if it, or all others, have not been run."""
        return self._leads(self.ours)

    @property
    def leads_in_paper(self) -> bool | None:
        """Whether the leader is better than all others by the published numbers of the values that have been run."""
        return self._leads(self.paper)

    def _leads(self, means: Mapping[str, float]) -> bool | None:
        leader = self.order.leader
        others = [means[v] for v in self.values if v != leader]
        if leader not in means or not others:
            return None
        return means[leader] < min(others) if self.figure in self.order.lowest else means[leader] > max(others)

    @property
    def gap(self) -> tuple[float, float] | None:
        """Leader minus reference, (ours, the paper's); None if leader or reference has not been run."""
        leader, reference = self.order.leader, self.order.reference
        if not {leader, reference} <= set(self.ours):
            return None
        return self.ours[leader] - self.ours[reference], self.paper[leader] - self.paper[reference]


def compare_orders(table: Table, cells: Sequence[Cell]) -> list[OrderComparison]:
    """Return a comparison per figure and combination of the other axes' values, if at least two values have been run.

    Means over the common seeds are compared. Bounds, and cells in which a seed has no value, are left out.
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
        ours = {
            value: statistics.fmean(cell.seeds[seed] for seed in common or cell.seeds)
            for value, (cell, _) in group.items()
        }
        found.append(
            OrderComparison(
                place=dict(zip(others, place, strict=True)),
                figure=figure,
                values=list(group),
                ours=ours,
                paper={value: published for value, (_, published) in group.items()},
                order=order,
                seeds=len(common) or None,
            )
        )
    return found


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation in [-1, 1], ties at their mean rank; None if a side's values are all equal."""
    try:
        return statistics.correlation(ranks(left), ranks(right))
    except statistics.StatisticsError:
        return None
