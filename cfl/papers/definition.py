"""Papers and their tables: axes, the experiment for each combination of axis values, and the figure of each column."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from cfl.papers.entries import count, expression, load, one_of, refuse_unknown
from cfl.papers.published import Published, read_published
from cfl.papers.recipes import NotAvailable, Point, Recipe, Rule, matches, recipe, texts
from cfl.runtime.errors import ConfigError

PAPERS = Path(__file__).resolve().parent
SCALE = "scale"
"""An axis that every table has besides its own. Its value ``paper`` is the published protocol."""

OPTIONS = {"benchmark": "--bench", "method": "--methods", "partition": "--partition"}
"""Axis -> the command-line option that chooses its values. Values of all other axes are chosen by ``--only``."""

Best = Literal["highest", "lowest"]
"""Whether the highest or the lowest value of a column is the best."""

Over = Literal["tasks", "rounds"]
"""Whether curves have an entry per task learned or one per communication round."""


@dataclass(frozen=True)
class Figure:
    """One column, and how its value is computed from a finished run.

    Attributes:
        value: an expression over the run's figures (:mod:`cfl.papers.expressions`).
        less: if not empty, the same figure of another run is subtracted: the run with these axis values.
        of: axis values of the run that is read, if they differ from those of the cell.
        tolerance: difference from the published number that still counts as matched, in the column's unit.
        decimals: digits behind the point.
        when: axis values of the points that have this column; empty: all points.
        any_scale: whether the value is the same at every scale, such as the size of a network. It is then compared with
            the published number at every scale.
    """

    value: str
    less: Mapping[str, str] = field(default_factory=dict)
    of: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    decimals: int = 2
    when: Mapping[str, Any] = field(default_factory=dict)
    any_scale: bool = False

    @classmethod
    def read(cls, entry: str | Mapping[str, Any], where: str) -> Figure:
        """Read a data file's entry: the expression, or the attributes by name.

        Raises:
            ConfigError: a key is unknown, or the expression is invalid.
        """
        options = {"value": entry} if isinstance(entry, str) else entry
        refuse_unknown(options, cls.__dataclass_fields__, where)
        expression(options["value"], where)
        return cls(**options)

    def points(self, point: Point) -> list[dict[str, str]]:
        """Return the points of the runs that are needed: the run that is read, and the one subtracted, if any."""
        return [{**point, **self.of}] + ([{**point, **self.less}] if self.less else [])


@dataclass(frozen=True)
class NoTarget:
    """Published numbers that a good run need not reach; our numbers are not compared with them.

    Attributes:
        why: the reason, for readers.
        when: axis values of the points to which this applies; empty: all points.
        figures: columns to which this applies; empty: all columns.
    """

    why: str
    when: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[str] = ()

    @classmethod
    def read(cls, entry: Mapping[str, Any], figures: Collection[str], where: str) -> NoTarget:
        """Read a data file's entry with ``why``, and perhaps ``when`` and ``figures``.

        Raises:
            ConfigError: a key is unknown, ``why`` is missing, or a figure is named that the table does not have.
        """
        refuse_unknown(entry, cls.__dataclass_fields__, f"{where}, no_targets")
        if not isinstance(entry.get("why"), str):
            raise ConfigError(f"{where}, no_targets.why", entry.get("why"), "a text that says why")
        for name in entry.get("figures", ()):
            one_of(name, figures, f"{where}, no_targets.figures")
        return cls(**entry)

    def holds(self, point: Point, figure: str) -> bool:
        """Return whether this applies to a cell."""
        return matches(self.when, point) and (not self.figures or figure in self.figures)


@dataclass(frozen=True)
class Note:
    """A sentence below a table.

    Attributes:
        text: the sentence.
        when: axis values of the points that the sentence is about; empty: all points.
    """

    text: str
    when: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: str | Mapping[str, Any], where: str) -> Note:
        """Read a data file's entry: the sentence, or ``text`` and ``when``.

        Raises:
            ConfigError: a key is unknown, or there is no sentence.
        """
        if isinstance(entry, str):
            return cls(entry)
        refuse_unknown(entry, cls.__dataclass_fields__, f"{where}, notes")
        if not isinstance(entry.get("text"), str):
            raise ConfigError(f"{where}, notes.text", entry.get("text"), "a sentence")
        return cls(**entry)


@dataclass(frozen=True)
class Order:
    """The order of the values of an axis, such as methods, which is compared if the numbers cannot be.

    Attributes:
        axis: the axis whose values are ranked.
        figures: the columns by which they are ranked, each separately.
        leader: the axis value that is the best in the paper.
        reference: the axis value from which the leader's distance is measured.
        lowest: the columns of which the lowest value is the best; of all others it is the highest.
        bounds: axis values that no method is expected to beat, such as training on all data at once. They are left out
            of the order.
        against: for a table without published numbers: the name of another table of the paper with the same axes, whose
            numbers are used, and the axis values that differ in that table.
    """

    axis: str
    figures: Sequence[str]
    leader: str
    reference: str
    lowest: Collection[str] = ()
    bounds: Sequence[str] = ()
    against: tuple[str, Mapping[str, str]] | None = None

    @classmethod
    def read(
        cls, entry: Mapping[str, Any], axes: Mapping[str, Sequence[str]], figures: Collection[str], where: str
    ) -> Order:
        """Read a data file's entry.

        It has ``axis``, ``figure`` (one or a list), ``leader`` and ``reference``, and may have ``best``, ``bounds`` and
        ``against`` (``{table: table1, at: {benchmark: noniid}}``).

        Raises:
            ConfigError: a key is unknown or missing, or an axis, a value or a figure is named that the table does not
                have.
        """
        needed = ("axis", "figure", "leader", "reference")
        refuse_unknown(entry, (*needed, "best", "bounds", "against"), f"{where}, order")
        for key in needed:
            if key not in entry:
                raise ConfigError(f"{where}, order.{key}", None, f"given, as {', '.join(needed)} are")
        axis = one_of(entry["axis"], axes, f"{where}, order.axis", "the axes ")
        named = entry["figure"] if isinstance(entry["figure"], list) else [entry["figure"]]
        if not named or not all(named.count(name) == 1 and name in list(figures) for name in named):
            valid = f"one or more of the figures {', '.join(figures)}, each once"
            raise ConfigError(f"{where}, order.figure", entry["figure"], valid)
        best = entry.get("best", "highest")
        by_figure = best if isinstance(best, dict) else dict.fromkeys(named, best)
        if not by_figure or not set(by_figure) <= set(named) or not set(by_figure.values()) <= set(get_args(Best)):
            valid = f"highest or lowest, or one of them for each of {', '.join(named)}"
            raise ConfigError(f"{where}, order.best", best, valid)
        bounds = tuple(entry.get("bounds", ()))
        for value in (entry["leader"], entry["reference"], *bounds):
            one_of(value, axes[axis], f"{where}, order", "the axis values ")
        against = entry.get("against")
        if against is not None:
            refuse_unknown(against, ("table", "at"), f"{where}, order.against")
            against = (against["table"], against.get("at", {}))
        lowest = tuple(name for name in named if by_figure.get(name) == "lowest")
        return cls(axis, tuple(named), entry["leader"], entry["reference"], lowest, bounds, against)


@dataclass(frozen=True)
class Table:
    """One table or figure of a paper; ``docs/tables.md`` describes its file, whose keys are the attributes."""

    paper: Paper
    name: str
    title: str
    axes: Mapping[str, Sequence[str]]
    fixed: Mapping[str, str]
    figures: Mapping[str, Figure]
    rules: Sequence[Rule]
    order: Order | None
    lines: str | None
    implied: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]]
    cannot: Sequence[tuple[Mapping[str, Any], str]]
    notes: Sequence[Note]
    over: Over = "tasks"
    seeds: int = 1
    no_targets: Sequence[NoTarget] = ()
    dotted: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """The name with the paper's, e.g. ``fot-table1``."""
        return f"{self.paper.name}-{self.name}"

    def select(self, chosen: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The table's axes with only the chosen values, in the table's order.

        Raises:
            ConfigError: an axis or a value that the table does not have.
        """
        for axis, values in chosen.items():
            if axis not in self.axes:
                always = f" (it is {self.fixed[axis]})" if axis in self.fixed else ""
                ways = "; ".join(f"{name}, by {_option(name, of)}" for name, of in self.axes.items())
                raise ConfigError(
                    _option(axis),
                    ",".join(values),
                    f"nothing, as {self.full_name} has no axis {axis}{always}; its axes are: {ways}",
                )
            for value in values:
                if value not in self.axes[axis]:
                    raise ConfigError(
                        _option(axis), value, f"for {self.full_name}: one or more of {','.join(self.axes[axis])}"
                    )
        return {a: [v for v in values if v in chosen.get(a, values)] for a, values in self.axes.items()}

    def points(self, scale: str, chosen: Mapping[str, Sequence[str]] | None = None) -> Iterator[dict[str, str]]:
        """Every combination of the (chosen) axis values, with the fixed ones and the scale.

        Raises:
            ConfigError: an axis, value or scale that the table does not have, or a choice of points without any column.
        """
        one_of(scale, self.paper.scales, "--scale")
        axes = self.select(chosen or {})
        found = []
        for values in itertools.product(*axes.values()):
            point = {**self.fixed, **dict(zip(axes, values, strict=True)), SCALE: scale}
            for when, further in self.implied:
                if matches(when, point):
                    point |= further
            found.append(point)
        if chosen and not any(self.figures_at(point) for point in found):
            asked = {axis: ",".join(axes[axis]) for axis in axes if axis in chosen}
            nothing = ", ".join(f"{axis} {values}" for axis, values in asked.items())
            raise ConfigError(
                ", ".join(_option(axis) for axis in asked),
                ", ".join(asked.values()),
                f"cells of {self.full_name}; it has no figure for {nothing}",
            )
        yield from found

    def label(self, axis: str, value: str) -> str:
        """Return how the table shows an axis value: by its own label if it has one, else by the paper's."""
        return self.labels.get(axis, {}).get(value) or self.paper.label(axis, value)

    def place(self, point: Point) -> dict[str, str]:
        """Return the values of the table's axes at a point, which name its cells."""
        return {axis: point[axis] for axis in self.axes}

    def figures_at(self, point: Point) -> dict[str, Figure]:
        """The columns that a point has."""
        return {name: figure for name, figure in self.figures.items() if matches(figure.when, point)}

    def recipe(self, point: Point) -> Recipe:
        """Return how a point's run is made.

        Raises:
            NotAvailable: a config file that the run needs does not exist, or the table says that it cannot be run.
        """
        key = frozenset(point.items())
        if key not in self._recipes:  # each is needed for every column of a row
            for when, why in self.cannot:
                if matches(when, point):
                    raise NotAvailable(why)
            self._recipes[key] = recipe([*self.paper.rules, *self.rules], point)
        return self._recipes[key]

    @cached_property
    def _recipes(self) -> dict[frozenset[tuple[str, str]], Recipe]:
        return {}

    def no_target(self, point: Point, figure: str) -> str | None:
        """Return why a cell's published number is no target (:class:`NoTarget`), or None if it is one."""
        return next((part.why for part in self.no_targets if part.holds(point, figure)), None)

    def order_number(self, point: Point, figure: str) -> float | None:
        """Return the published number that ranks a point, its own or that of ``order.against``; None without one."""
        place = self.place(point)
        if self.order is not None and self.order.against is not None:
            place |= self.order.against[1]
        return self._order_numbers.get((frozenset(place.items()), figure))

    @cached_property
    def _order_numbers(self) -> dict[tuple[frozenset[tuple[str, str]], str], float]:
        table = self
        if self.order is not None and self.order.against is not None:
            table = read_table(self.paper, self.paper.folder / f"{self.order.against[0]}.yaml")
        return {(frozenset(number.place.items()), number.figure): number.mean for number in table.published}

    @property
    def published(self) -> list[Published]:
        """The table's published numbers; empty for a picture."""
        path = self.paper.folder / "published" / f"{self.name}.csv"
        return read_published(path, self.paper.name, self.name, list(self.axes)) if path.is_file() else []


@dataclass(frozen=True)
class Paper:
    """One paper: a folder with ``paper.yaml`` and a file per table.

    Attributes:
        name: name of the folder.
        folder: the folder with its files.
        title: title, authors and venue.
        scales: name -> meaning; the first scale is the published protocol.
        run_folder: axes whose values make the path of a run.
        labels: axis -> value -> label in tables.
        rules: rules that define the experiment of each point.
        seeds: number of seeds of its tables, unless a table has its own number.
        notes: settings of all its tables that differ from the paper or are not in it.
    """

    name: str
    folder: Path
    title: str
    scales: Mapping[str, str]
    run_folder: Sequence[str]
    labels: Mapping[str, Mapping[str, str]]
    rules: Sequence[Rule]
    seeds: int
    notes: Sequence[Note]

    @property
    def published_scale(self) -> str:
        """The scale whose numbers may be compared with the published ones."""
        return next(iter(self.scales))

    def label(self, axis: str, value: str) -> str:
        """How a table shows an axis value."""
        return self.labels.get(axis, {}).get(value, value)

    def values(self) -> dict[str, set[str]]:
        """Axis -> the values that it has in any of the tables."""
        found: dict[str, set[str]] = {}
        for table in self.tables():
            for axis, values in [*table.axes.items(), *((axis, [value]) for axis, value in table.fixed.items())]:
                found.setdefault(axis, set()).update(values)
        return found

    def tables(self) -> list[Table]:
        """All tables and figures, in the paper's order."""
        files = [path for path in self.folder.glob("*.yaml") if path.stem != "paper"]
        return [read_table(self, path) for path in sorted(files, key=lambda path: _natural(path.stem))]


def _option(axis: str, values: Sequence[str] = ()) -> str:
    """Return the command-line words that choose an axis or its values: ``--bench``, ``--only variant=a,b``."""
    option, between = (OPTIONS[axis], " ") if axis in OPTIONS else (f"--only {axis}", "=")
    return f"{option}{between}{','.join(values)}" if values else option


def _natural(name: str) -> tuple[bool, bool, int, str]:
    """Return the sort key of tables: tables before figures, ``-present`` ones last of each, then by their number."""
    number = re.search(r"\d+", name)
    return not name.startswith("table"), name.endswith("-present"), int(number[0]) if number else 0, name


def papers(folder: Path = PAPERS) -> list[Paper]:
    """All papers, by name."""
    return [read_paper(path.parent) for path in sorted(folder.glob("*/paper.yaml"))]


def table_named(name: str) -> Table:
    """The table called e.g. ``fot-table1``.

    Raises:
        ConfigError: there is no such table; the message lists the existing ones.
    """
    tables = {table.full_name: table for paper in papers() for table in paper.tables()}
    return tables[one_of(name, tables, "table")]


def read_paper(folder: Path) -> Paper:
    """Read ``paper.yaml``.

    Raises:
        ConfigError: a key is unknown or missing.
    """
    path = folder / "paper.yaml"
    entry = load(path, "paper")
    refuse_unknown(entry, [key for key in Paper.__dataclass_fields__ if key not in ("name", "folder")], str(path))
    return Paper(
        name=folder.name,
        folder=folder,
        title=entry["title"],
        scales=entry["scales"],
        run_folder=tuple(entry["run_folder"]),
        labels=_labels(entry),
        rules=[Rule.read(rule, str(path)) for rule in entry["rules"]],
        seeds=count(entry.get("seeds"), f"{path}, seeds"),
        notes=[Note.read(note, str(path)) for note in entry.get("notes", [])],
    )


def read_table(paper: Paper, path: Path) -> Table:
    """Read one table's file.

    Raises:
        ConfigError: a key is unknown, an expression is invalid, or an axis is named that the table does not have.
    """
    entry, where = load(path, "table"), str(path)
    refuse_unknown(entry, [key for key in Table.__dataclass_fields__ if key not in ("paper", "name")], where)
    axes = {axis: texts(values) for axis, values in entry["axes"].items()}
    figures = {name: Figure.read(given, f"{where}, figures.{name}") for name, given in entry["figures"].items()}
    order = Order.read(entry["order"], axes, figures, where) if entry.get("order") else None
    lines = one_of(entry["lines"], axes, f"{where}, lines", "the axes ") if entry.get("lines") is not None else None
    over: Any = one_of(entry.get("over", "tasks"), get_args(Over), f"{where}, over")
    if "over" in entry and not lines:
        raise ConfigError(f"{where}, over", over, "unset where there are no lines: it says what curves run over")
    return Table(
        paper=paper,
        name=path.stem,
        title=entry["title"],
        axes=axes,
        fixed={axis: str(value) for axis, value in entry.get("fixed", {}).items()},
        figures=figures,
        rules=[Rule.read(rule, where) for rule in entry.get("rules", [])],
        order=order,
        lines=lines,
        implied=[(part["when"], part["axes"]) for part in entry.get("implied", [])],
        cannot=[(part["when"], part["why"]) for part in entry.get("cannot", [])],
        notes=[Note.read(note, where) for note in entry.get("notes", [])],
        over=over,
        seeds=count(entry.get("seeds", paper.seeds), f"{where}, seeds"),
        no_targets=[NoTarget.read(part, figures, where) for part in entry.get("no_targets", [])],
        dotted=_dotted(entry, axes, lines, where),
        labels=_labels_of(entry, axes, where),
    )


def _dotted(
    entry: Mapping[str, Any], axes: Mapping[str, Sequence[str]], lines: str | None, where: str
) -> dict[str, str]:
    dotted = {axis: str(value) for axis, value in entry.get("dotted", {}).items()}
    if dotted and not (lines and len(dotted) == 1):
        raise ConfigError(f"{where}, dotted", dotted, "one axis and its value, where there are lines")
    for axis, value in dotted.items():
        if axis == lines or value not in axes.get(axis, ()):
            valid = "an axis other than that of the lines, and its value"
            raise ConfigError(f"{where}, dotted", f"{axis}: {value}", valid)
    return dotted


def _labels_of(entry: Mapping[str, Any], axes: Mapping[str, Sequence[str]], where: str) -> dict[str, dict[str, str]]:
    labels = _labels(entry)
    for axis, names in labels.items():
        for value in names:
            if value not in axes.get(axis, ()):
                raise ConfigError(f"{where}, labels", f"{axis}: {value}", "an axis of the table, and its value")
    return labels


def _labels(entry: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return {axis: {str(value): name for value, name in of.items()} for axis, of in entry.get("labels", {}).items()}
