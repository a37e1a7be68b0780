"""A table's cells: what is published, what our runs gave, and how the two stand to each other."""

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
        table: where it belongs.
        point: axis values, fixed ones and scale included.
        figure: the column.
        published: the paper's number, or None.
        seeds: seed -> our value: a number, a list with one per task, or a grid.
        otherwise: the status of a cell without a value of ours.
        notes: which of its settings were chosen by us.
        without: seed -> why its run has no such value, e.g. a target that was never reached.
        unrecorded: those of them whose runs do not record what the value is made of, which says nothing of the value.
        remarks: in what the data of its runs were not the published ones.
    """

    table: Table
    point: Mapping[str, str]
    figure: str
    published: Published | None
    seeds: Mapping[int, Any] = field(default_factory=dict)
    otherwise: str = "not run"
    notes: Sequence[str] = ()
    without: Mapping[int, str] = field(default_factory=dict)
    unrecorded: Collection[int] = ()
    remarks: Sequence[str] = ()

    @property
    def definition(self) -> Figure:
        """What fills the column."""
        return self.table.figures[self.figure]

    @property
    def ran(self) -> bool:
        """Whether there is a run, with a value or without."""
        return bool(self.seeds) or bool(self.without)

    @property
    def has_target(self) -> bool:
        """Whether there is a published number that ours should meet at the published protocol."""
        return self.published is not None and self.table.no_target(self.point, self.figure) is None

    @property
    def reduced(self) -> bool:
        """Whether its runs are at a reduced scale, at which the value is another."""
        return self.point[SCALE] != self.table.paper.published_scale and not self.definition.any_scale

    @property
    def is_ordered(self) -> bool:
        """Whether the table compares the order of such values, and has published ones for this place."""
        order = self.table.order
        if order is None or self.figure not in order.figures or self.point[order.axis] in order.bounds:
            return False
        return self.table.order_number(self.point, self.figure) is not None

    @property
    def told(self) -> bool:
        """Whether the runs say something of the value: what it is, or that there is none."""
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
        """Ours minus the paper's; None for what is not held against it: a reduced scale, the mean of some seeds."""
        if self.reduced or self.without or self.remarks:
            return None
        if self.ours is None or self.published is None or not self.has_target:
            return None
        return self.ours.mean - self.published.mean

    @property
    def status(self) -> str:
        """How the cell stands to the paper, as ``docs/tables.md`` lists it: ``matched``, ``short: by order only``, ...

        Matched is a number whose difference is at most the sum of both deviations, or the column's tolerance. A run at
        a reduced scale is never held against a published number, and neither is the mean of those seeds alone that
        have a value. Whatever came of a reduced scale begins with its name, so that a run that got nowhere in a part of
        the published rounds does not read as a failed reproduction.
        """
        if not self.ran:
            return self.otherwise
        scale = f"{self.point[SCALE]}: " if self.reduced else ""
        if not self.seeds:
            return f"{scale}{self.otherwise}"
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
        # One part in 10^9 for the rounding of decimal fractions: 0.5 is within 0.5.
        within = abs(self.difference) <= allowed * (1 + 1e-9)
        return "matched" if within else f"off by {rounded(self.difference, self.definition.decimals, '+')}"


@dataclass
class Missing(Lacking[Result]):
    """What a table lacks.

    Attributes:
        cannot: of what cannot be run: name, reason.
        refused: of cells whose configuration is refused: name, message.
    """

    cannot: list[tuple[str, str]]
    refused: list[tuple[str, str]]


class _Found(NamedTuple):
    """A recipe's finished runs by seed, the seeds that diverged, and why there can be none, e.g. missing data sets."""

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
            scale: which runs.
            chosen: axis -> values, to leave others out.
            seeds: use these only; None takes whatever there is.

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
        """A cell with what the finished runs give it."""
        parts: list[_Found] = []
        notes: list[str] = []
        otherwise = "not run"
        for part in cell.definition.points(cell.point):
            try:
                recipe = cell.table.recipe(part)
            except NotAvailable as reason:
                return replace(cell, otherwise=f"cannot run here ({reason})")
            notes += recipe.notes
            parts.append(self._runs(recipe.arguments))
            if parts[-1].absent:
                otherwise = f"cannot run here ({parts[-1].absent})"
        values: dict[int, Any] = {}
        without: dict[int, str] = {}
        unrecorded: list[int] = []
        remarks: list[str] = []
        for seed in sorted(set.intersection(*({*part.runs, *part.diverged} for part in parts))):
            if seeds is not None and seed not in seeds:
                continue
            if any(seed in part.diverged for part in parts):
                without[seed] = DIVERGED
                otherwise = f"failed ({DIVERGED})"
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
                otherwise = f"no value ({without[seed]})"
                continue
            values[seed] = read[0] - read[1] if len(read) == 2 else read[0]
        return replace(
            cell,
            seeds=values,
            otherwise=otherwise,
            notes=tuple(dict.fromkeys(notes)),
            without=without,
            unrecorded=unrecorded,
            remarks=tuple(dict.fromkeys(remarks)),
        )

    def _runs(self, arguments: tuple[str, ...]) -> _Found:
        """The runs of a recipe."""
        if arguments not in self._found:
            found = _Found({}, {}, None)
            if self.results.all or self.results.diverged or self.missing.known:  # resolving takes its time
                try:
                    experiment = self.resolver.experiment(arguments)
                    of_it, diverged = self.results.of(experiment), self.results.diverged_seeds(experiment)
                    found = _Found(of_it, diverged, self.missing.reason(needs_of(experiment)))
                except (ConfigError, NotUnderstood) as error:  # what runs were made with once may be refused by now
                    found = _Found({}, {}, f"its configuration is refused: {' '.join(str(error).split())}")
            self._found[arguments] = found
        return self._found[arguments]

    def jobs(
        self, table: Table, scale: str, chosen: Mapping[str, Sequence[str]] | None, seeds: Sequence[int], root: Path
    ) -> Missing:
        """The runs that a table lacks.

        Args:
            table: the table.
            scale: at which scale.
            chosen: axis -> values, to leave others out.
            seeds: of which seeds.
            root: below it, run folders are made.

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
                except (ConfigError, NotUnderstood) as error:  # of this cell alone
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
    """Every run of a table that can be described here, with its point; two points may describe the same run."""
    for point in table.points(scale):
        for figure in table.figures_at(point).values():
            for part in figure.points(point):
                try:
                    yield part, table.recipe(part)
                except NotAvailable:
                    continue
