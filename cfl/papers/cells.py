"""A table's cells: the published numbers, our numbers, and how the two compare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cfl.papers.definition import SCALE, Figure, Table
from cfl.papers.expressions import Undefined, Unrecorded
from cfl.papers.grids import Grid, mean_grid
from cfl.papers.published import Published
from cfl.papers.recipes import NotAvailable, Recipe
from cfl.papers.results import Result, Results
from cfl.reporting.compare.statistics import Spread
from cfl.reporting.experiment import config_hash
from cfl.reporting.rounding import rounded
from cfl.running.jobs import Lacking, Wanted, lacking
from cfl.running.missing_data import MissingData, needs_of
from cfl.running.resolving import Resolver
from cfl.runtime.errors import ConfigError, NotUnderstood

DIVERGED = "values left the finite numbers"


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Attributes:
        table: the table that it belongs to.
        point: axis values, fixed ones and scale included.
        figure: the column.
        published: the paper's number, or None.
        seeds: seed -> our value: a number, a list with one per task or round, or a grid.
        status_without_value: the status of a cell without a value of ours.
        notes: settings of its runs that were chosen by us.
        without: seed -> why its run has no value, e.g. a target that was never reached.
        unrecorded: those seeds of ``without`` whose runs do not record the figures from which the value is computed.
        remarks: how the data of its runs differ from the published ones.
    """

    table: Table
    point: Mapping[str, str]
    figure: str
    published: Published | None
    seeds: Mapping[int, Any] = field(default_factory=dict)
    status_without_value: str = "not run"
    notes: Sequence[str] = ()
    without: Mapping[int, str] = field(default_factory=dict)
    unrecorded: Collection[int] = ()
    remarks: Sequence[str] = ()

    @property
    def definition(self) -> Figure:
        """The definition of the column."""
        return self.table.figures[self.figure]

    @property
    def ran(self) -> bool:
        """Whether there is a run, with a value or without."""
        return bool(self.seeds) or bool(self.without)

    @property
    def has_target(self) -> bool:
        """Whether there is a published number that ours should match under the published protocol."""
        return self.published is not None and self.table.no_target(self.point, self.figure) is None

    @property
    def reduced(self) -> bool:
        """Whether its runs are at a reduced scale, at which another value is expected."""
        return self.point[SCALE] != self.table.paper.published_scale and not self.definition.any_scale

    @property
    def is_ordered(self) -> bool:
        """Whether the table compares orders by this figure, and has a published number that ranks this point."""
        order = self.table.order
        if order is None or self.figure not in order.figures or self.point[order.axis] in order.bounds:
            return False
        return self.table.order_number(self.point, self.figure) is not None

    @property
    def is_settled(self) -> bool:
        """Whether runs show the value, or show that there is none."""
        return bool(self.seeds) or bool(set(self.without) - set(self.unrecorded))

    @property
    def ours(self) -> Spread | None:
        """Our number; None without a run, for a curve and for a grid."""
        return Spread.of([value for value in self.seeds.values() if isinstance(value, int | float)])

    @property
    def grid(self) -> Grid | None:
        """Our grid, the mean over seeds; None without a run and for numbers and curves."""
        grids = [value for value in self.seeds.values() if isinstance(value, Grid)]
        return mean_grid(grids) if grids else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None if they are not compared, as at a reduced scale or if a seed has no value."""
        if self.reduced or self.without or self.remarks:
            return None
        if self.ours is None or self.published is None or not self.has_target:
            return None
        return self.ours.mean - self.published.mean

    @property
    def status(self) -> str:
        """How the cell compares with the paper, as listed in ``docs/tables.md``: ``matched``, ``off by +1.20``, ...

        A number is matched if the difference is at most the sum of both deviations, or the column's tolerance. Runs at
        a reduced scale are never compared with a published number. Neither is a mean if some seeds have no value. The
        status of runs at a reduced scale begins with the scale's name, so that a bad result of fewer rounds is not read
        as a failed reproduction.
        """
        if not self.ran:
            return self.status_without_value
        scale = f"{self.point[SCALE]}: " if self.reduced else ""
        if not self.seeds:
            return f"{scale}{self.status_without_value}"
        if self.without:
            reasons = "; ".join(dict.fromkeys(self.without.values()))
            return f"{scale}value in {len(self.seeds)} of {len(self.seeds) + len(self.without)} seeds only ({reasons})"
        if self.reduced:
            return f"{scale}{'by order only' if self.is_ordered else 'not compared'}"
        if self.published is not None and not self.has_target:
            return f"not compared ({self.table.no_target(self.point, self.figure)})"
        if self.published is not None and self.remarks:
            return f"not compared (other data: {'; '.join(self.remarks)})"
        if self.difference is None or self.published is None or self.ours is None:
            return "run"
        allowed = max((self.published.std or 0.0) + (self.ours.std or 0.0), self.definition.tolerance)
        # The relative margin of 1e-9 is for the rounding of decimal fractions: 0.5 must be within 0.5.
        within = abs(self.difference) <= allowed * (1 + 1e-9)
        return "matched" if within else f"off by {rounded(self.difference, self.definition.decimals, '+')}"


@dataclass
class Missing(Lacking[Result]):
    """The runs that a table lacks, and the cells that cannot be run.

    Attributes:
        cannot: (name, reason) of the cells that cannot be run here.
        refused: (name, message) of the cells whose configuration is refused.
    """

    cannot: list[tuple[str, str]]
    refused: list[tuple[str, str]]


class _Found(NamedTuple):
    """A recipe's finished runs by seed, its diverged runs by seed, and why it cannot be run, e.g. missing data sets."""

    runs: dict[int, Result]
    diverged: dict[int, Path]
    absent: str | None


class Experiments:
    """The experiments of tables' points, and the finished runs that belong to them.

    Args:
        resolver: turns arguments into experiments.
        results: the finished runs.
        missing: data sets known to be missing.
    """

    def __init__(self, resolver: Resolver, results: Results, missing: MissingData) -> None:
        self.resolver, self.results, self.missing = resolver, results, missing
        self._found: dict[tuple[str, ...], _Found] = {}

    def cells(
        self,
        table: Table,
        scale: str,
        chosen: Mapping[str, Sequence[str]] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Cell]:
        """A table's cells, filled from the finished runs.

        Args:
            table: the table.
            scale: scale of the runs.
            chosen: axis -> values; cells with other values are left out.
            seeds: use only these seeds; None takes all finished ones.

        Raises:
            ConfigError: an axis, value or scale that the table does not have.
        """
        numbers = {(tuple(p.place[a] for a in table.axes), p.figure): p for p in table.published}
        found: list[Cell] = []
        for point in table.points(scale, chosen):
            key = tuple(point[axis] for axis in table.axes)
            for name in table.figures_at(point):
                cell = Cell(table, point, name, numbers.get((key, name)))
                found.append(self._filled(cell, seeds))
        return found

    def _filled(self, cell: Cell, seeds: Sequence[int] | None) -> Cell:
        """Return a cell with its values from the finished runs."""
        parts: list[_Found] = []
        notes: list[str] = []
        status_without_value = "not run"
        for part in cell.definition.points(cell.point):
            try:
                recipe = cell.table.recipe(part)
            except NotAvailable as reason:
                return replace(cell, status_without_value=f"cannot run here ({reason})")
            notes += recipe.notes
            parts.append(self._runs(recipe.arguments))
            if parts[-1].absent:
                status_without_value = f"cannot run here ({parts[-1].absent})"
        values: dict[int, Any] = {}
        without: dict[int, str] = {}
        unrecorded: list[int] = []
        remarks: list[str] = []
        undefined = ""
        for seed in sorted(set.intersection(*({*part.runs, *part.diverged} for part in parts))):
            if seeds is not None and seed not in seeds:
                continue
            if any(seed in part.diverged for part in parts):
                without[seed] = DIVERGED
                status_without_value = f"failed ({DIVERGED})"
                continue
            runs = [part.runs[seed] for part in parts]
            remarks += [line for run in runs for line in run.summary.get("data_unlike_published") or []]
            try:
                read = [run.figure(cell.definition.value) for run in runs]
            except Undefined as reason:
                without[seed] = str(reason)
                if isinstance(reason, Unrecorded):
                    unrecorded.append(seed)
                    without[seed] += "; remove its folder and run it again"
                undefined = f"no value ({without[seed]})"
                continue
            values[seed] = read[0] - read[1] if len(read) == 2 else read[0]
        return replace(
            cell,
            seeds=values,
            status_without_value=undefined or status_without_value,
            notes=tuple(dict.fromkeys(notes)),
            without=without,
            unrecorded=unrecorded,
            remarks=tuple(dict.fromkeys(remarks)),
        )

    def _runs(self, arguments: tuple[str, ...]) -> _Found:
        """The runs of a recipe."""
        if arguments not in self._found:
            found = _Found({}, {}, None)
            if self.results.all or self.results.diverged or self.missing.known:  # resolving is slow
                try:
                    experiment = self.resolver.experiment(arguments)
                    of_it, diverged = self.results.of(experiment), self.results.diverged_seeds(experiment)
                    found = _Found(of_it, diverged, self.missing.reason(needs_of(experiment)))
                except (ConfigError, NotUnderstood) as error:  # settings of old runs may be refused now
                    found = _Found({}, {}, f"its configuration is refused: {' '.join(str(error).split())}")
            self._found[arguments] = found
        return self._found[arguments]

    def jobs(
        self, table: Table, scale: str, chosen: Mapping[str, Sequence[str]] | None, seeds: Sequence[int], root: Path
    ) -> Missing:
        """The runs that a table lacks.

        Args:
            table: the table.
            scale: scale of the runs.
            chosen: axis -> values; cells with other values are left out.
            seeds: seeds of the runs.
            root: folder below which run folders are made.

        Raises:
            ConfigError: an axis, value or scale that the table does not have.
        """
        wanted: dict[str, Wanted] = {}
        cannot: dict[str, str] = {}
        refused: dict[str, str] = {}
        for point in table.points(scale, chosen):
            for part in [part for figure in table.figures_at(point).values() for part in figure.points(point)]:
                name = " ".join(part[axis] for axis in part)
                try:
                    recipe = table.recipe(part)
                except NotAvailable as reason:
                    cannot[name] = str(reason)
                    continue
                try:
                    experiment = self.resolver.experiment(recipe.arguments)
                    made = self.results.of(experiment)
                    if any(seed not in made for seed in seeds):
                        self.resolver.check(recipe.arguments)
                except (ConfigError, NotUnderstood) as error:  # only this cell cannot be run
                    refused[name] = str(error)
                    continue
                one = Wanted(name, recipe.arguments, root / table_folder(table, part), part[SCALE])
                wanted.setdefault(config_hash(experiment), one)
        lacks = lacking(wanted.values(), seeds, self.resolver, self.results)
        return Missing(lacks.jobs, lacks.finished, lacks.diverged, [*cannot.items()], [*refused.items()])


def table_folder(table: Table, point: Mapping[str, str]) -> Path:
    """The folder of a point's runs below ``runs/tables``: ``fot/pmnist/iid/fedavg``."""
    return Path(table.paper.name, *(point[axis] for axis in table.paper.run_folder if axis in point))


def each_recipe(table: Table, scale: str) -> Iterator[tuple[dict[str, str], Recipe]]:
    """Yield the point and recipe of every run of a table, without unavailable ones; points may share a recipe."""
    for point in table.points(scale):
        for figure in table.figures_at(point).values():
            for part in figure.points(point):
                try:
                    yield part, table.recipe(part)
                except NotAvailable:
                    continue
