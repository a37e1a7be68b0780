"""Choose settings that a paper does not publish, by a grid or a search and a rule that selects one value."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cfl.papers.definition import SCALE, Best, Paper, papers
from cfl.papers.entries import count, expression, load, mapping, one_of, refuse_unknown
from cfl.papers.expressions import Undefined, Unrecorded
from cfl.papers.recipes import CHOSEN, Recipe, Rule, recipe
from cfl.papers.results import Result, Results
from cfl.running.grid import Values, combinations, named, setting
from cfl.running.jobs import Job, Wanted, lacking
from cfl.running.resolving import Resolver
from cfl.running.selection import at_an_end, best_of, candidates_table, mean_of, score_text, scores_of
from cfl.runtime.errors import ConfigError

_KEYS = ("paper", "point", "scale", "configs", "set", "grid", "search", "seeds", "select")


@dataclass(frozen=True)
class Search:
    """A search for one value: step up and down by a factor while the score improves, then by the next factor.

    This is the search of FedCurv (Shoham et al., 2019), with factors of 10, then 2. Every factor begins at the best
    value found so far. While all scores are minus infinity, steps continue, because no direction is known to be better.

    Attributes:
        key: config key.
        start: first value, above 0.
        factor: factors above 1, the coarse one first.
        steps: largest number of steps in each direction for each factor.
    """

    key: str
    start: float
    factor: Sequence[float] = (10.0, 2.0)
    steps: int = 3

    def run(self, score: Callable[[float], float | None]) -> float | None:
        """Return the best value found; None if a score that is needed is not known yet.

        Args:
            score: value -> its score, higher is better; minus infinity for a useless value, None if not known yet.
        """
        best, best_score = self.start, score(self.start)
        if best_score is None:
            return None
        for factor in self.factor:
            centre = best
            for step in (factor, 1 / factor):
                value = centre
                for _ in range(self.steps):
                    value = self._clean(value * step)
                    found = score(value)
                    if found is None:
                        return None
                    if found > best_score:
                        best, best_score = value, found
                    elif best_score > -math.inf:
                        break
        return best

    def _clean(self, value: float) -> float:
        """Remove rounding errors: 0.1 / 10 is 0.010000000000000002, which would be another experiment."""
        rounded = float(f"{value:.6g}")
        return int(rounded) if isinstance(self.start, int) and rounded.is_integer() else rounded


@dataclass(frozen=True)
class Sweep:
    """A sweep, as read from its file.

    Attributes:
        path: the file.
        paper: name of the paper whose rules make the experiment of ``point``; runs are below its folder.
        base: arguments of every candidate.
        point: axis values, scale included; empty where ``configs`` alone make the experiment.
        grid: config key -> values; empty with a search.
        search: the search, or None for a grid.
        seeds: each candidate has seeds 0 .. seeds - 1.
        value: expression over a run's figures by which candidates are compared.
        best: whether the highest or the lowest value wins; of equal candidates the first wins.
    """

    path: Path
    paper: str
    base: Recipe
    point: Mapping[str, str]
    grid: Mapping[str, Sequence[Any]]
    search: Search | None
    seeds: int
    value: str
    best: Best

    @property
    def name(self) -> str:
        """The name of the file, without its suffix."""
        return self.path.stem

    def check(self, resolver: Resolver) -> None:
        """Refuse a sweep whose file has a value with which no run can be made; of a search, only the start is checked.

        Raises:
            ConfigError: names the first such value.
        """
        for values in combinations(self.grid) if self.search is None else [((self.search.key, self.search.start),)]:
            resolver.check(self.arguments(values))

    def arguments(self, values: Values) -> list[str]:
        """Return a candidate's arguments of ``cfl fit``, without the seed."""
        return [*self.base.arguments, *(setting(key, value) for key, value in values)]

    def candidates(self, score: Callable[[Values], float | None]) -> tuple[list[Values], Values | None]:
        """Return the candidates that are known to be needed, and the chosen one, None until all of them have been run.

        NaN is worse than any number. If the values of all candidates are NaN, none is chosen.

        Args:
            score: candidate -> mean of its value over seeds; None if a seed has not been run.
        """
        highest = self.best == "highest"
        if self.search is None:
            means = [(values, score(values)) for values in combinations(self.grid)]
            return [values for values, _ in means], best_of(means, highest)
        key, asked = self.search.key, list[Values]()
        numbers: list[float] = []

        def signed(value: float) -> float | None:
            values = ((key, value),)
            if values not in asked:
                asked.append(values)
            found = score(values)
            if found is None or math.isnan(found):
                return None if found is None else -math.inf
            numbers.append(found)
            return found if highest else -found

        best = self.search.run(signed)
        return asked, None if best is None or not numbers else ((key, best),)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file; ``docs/tables.md`` describes it.

    Raises:
        ConfigError: a key is unknown, missing or cannot work.
    """
    entry = load(path, "sweep")
    refuse_unknown(entry, _KEYS, str(path))
    by_name = {paper.name: paper for paper in papers()}
    paper = by_name[one_of(entry.get("paper"), by_name, f"{path}, paper")]
    if ("grid" in entry) == ("search" in entry):
        raise ConfigError(f"{path}, grid", entry.get("grid"), "either grid or search")
    seeds = count(entry.get("seeds", 1), f"{path}, seeds")
    point, rules = _read_experiment(path, paper, entry)
    value, best = _read_select(path, mapping(entry.get("select", {}), f"{path}, select"))
    grid = _read_grid(path, mapping(entry["grid"], f"{path}, grid")) if "grid" in entry else {}
    search = _read_search(path, mapping(entry["search"], f"{path}, search")) if "search" in entry else None
    return Sweep(path, paper.name, recipe(rules, point), point, grid, search, seeds, value, best)


def _read_experiment(path: Path, paper: Paper, entry: Mapping[str, Any]) -> tuple[dict[str, str], list[Rule]]:
    """Read the point of the paper's tables, empty if there is none, and the rules that make its experiment."""
    point = {axis: str(value) for axis, value in mapping(entry.get("point", {}), f"{path}, point").items()}
    # Axes that only the rules of a single table use cannot be part of a sweep.
    used = set().union(*(rule.axes for rule in paper.rules)) - {SCALE}
    values = {axis: found for axis, found in paper.values().items() if axis in used}
    for axis, value in point.items():
        if axis not in values:
            valid = f"one of the axes {', '.join(values)}; anything else under configs or set"
            raise ConfigError(f"{path}, point.{axis}", value, valid)
        one_of(value, sorted(values[axis]), f"{path}, point.{axis}")
    scale = one_of(entry.get("scale", paper.published_scale), paper.scales, f"{path}, scale")
    configs = entry.get("configs", [])
    if not isinstance(configs, list) or not all(isinstance(name, str) for name in configs):
        raise ConfigError(f"{path}, configs", configs, "a list of files below configs/")
    if not point and not configs:
        raise ConfigError(f"{path}, point", None, "a point of the paper's tables, or configs")
    own = Rule(configs=tuple(configs), settings=mapping(entry.get("set", {}), f"{path}, set"))
    return ({**point, SCALE: scale}, [*paper.rules, own]) if point else ({}, [own])


def _read_select(path: Path, entry: Mapping[str, Any]) -> tuple[str, Best]:
    """Read the expression by which candidates are compared, and whether the highest or the lowest value wins."""
    refuse_unknown(entry, ("value", "best"), f"{path}, select")
    value = expression(entry.get("value", "acc"), f"{path}, select.value")
    best: Any = one_of(entry.get("best", "highest"), get_args(Best), f"{path}, select.best")
    # A made-up run with an empty summary shows whether the expression gives a list or misspells a function.
    matrix: list[list[float | None]] = [[1.0, 1.0], [1.0, 1.0]]
    made_up = Result({"data": {}}, path, {}, matrix, client_epochs=1, rounds=(1.0, 1.0), matrix_task_il=matrix)
    with contextlib.suppress(Undefined):
        _number_of(made_up, value, path)
    return value, best


def _read_grid(path: Path, entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Config key -> its values."""
    grid = {key: values if isinstance(values, list) else [values] for key, values in entry.items()}
    for key, values in grid.items():
        if not values:
            raise ConfigError(f"{path}, grid.{key}", values, "at least one value")
    if not grid:
        raise ConfigError(f"{path}, grid", entry, "config keys with a list of values each")
    return grid


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _read_search(path: Path, entry: Mapping[str, Any]) -> Search:
    refuse_unknown(entry, Search.__dataclass_fields__, f"{path}, search")
    if not isinstance(entry.get("key"), str):
        raise ConfigError(f"{path}, search.key", entry.get("key"), "a config key")
    if not _is_number(entry.get("start")) or entry["start"] <= 0:
        raise ConfigError(f"{path}, search.start", entry.get("start"), "a number above 0")
    search = Search(**entry)
    factors = search.factor
    if not isinstance(factors, list | tuple) or not factors or not all(_is_number(f) and f > 1 for f in factors):
        raise ConfigError(f"{path}, search.factor", factors, "a list of numbers above 1, the largest first")
    count(search.steps, f"{path}, search.steps")
    return search


class SweepState:
    """A sweep's candidates, their values in the finished runs, and the chosen one.

    A candidate is worse than any number if one of its runs has no value, because the run never reached an accuracy or
    diverged to NaN or infinity. A run that failed for another reason counts as missing.

    Args:
        sweep: the sweep.
        resolver: resolves its configurations.
        results: the finished runs.
        broken: names of the jobs that failed for another reason or were not run.

    Raises:
        ConfigError: the value that is compared is not a number.
    """

    def __init__(self, sweep: Sweep, resolver: Resolver, results: Results[Result], broken: Sequence[str] = ()) -> None:
        self.sweep, self.resolver, self.results, self.broken = sweep, resolver, results, broken
        self._recorded, self._unrecorded = False, ""
        self.candidates, self.chosen = sweep.candidates(self._mean)

    def values(self, candidate: Values) -> dict[int, float | str]:
        """Seed -> a candidate's value, or why there is none; without the seeds that are still to be run."""
        experiment = self.resolver.experiment(self.sweep.arguments(candidate))
        return scores_of(experiment, range(self.sweep.seeds), self.results, self._value)

    def _value(self, run: Result) -> float | str:
        """The value of a finished run, or why it has none."""
        found: float | str
        try:
            found = _number_of(run, self.sweep.value, self.sweep.path)
        except Unrecorded as reason:
            self._unrecorded = str(reason)
            return str(reason)
        except Undefined as reason:
            found = str(reason)
        self._recorded = True
        return found

    @property
    def compared(self) -> bool:
        """Whether any finished run records the value that is compared."""
        return self._recorded

    def check(self) -> None:
        """Refuse to go on with a value that no finished run records.

        Raises:
            ConfigError: a name is misspelt, or belongs to other methods.
        """
        if self._unrecorded and not self._recorded:
            valid = f"an expression of what runs record ({self._unrecorded})"
            raise ConfigError(f"{self.sweep.path}, select.value", self.sweep.value, valid)

    def _mean(self, candidate: Values) -> float | None:
        return mean_of(self.values(candidate), self.sweep.seeds)

    def jobs(self, root: Path) -> list[Job]:
        """Return the missing runs; a search needs further runs once these are finished."""
        sweep, found = self.sweep, []
        above, scale = root / sweep.paper / "sweeps" / sweep.name, sweep.point.get(SCALE, "run")
        for values in self.candidates:
            wanted = Wanted(f"{sweep.name} {named(values)}", sweep.arguments(values), above, scale)
            found += lacking([wanted], range(sweep.seeds), self.resolver, self.results).jobs
        return found

    def markdown(self) -> str:
        """Return the table of candidates and, once a value is chosen, the line for the method's config file."""
        sweep = self.sweep
        table = candidates_table([(v, self.values(v)) for v in self.candidates], self.chosen, sweep.value)
        lines = [f"# Sweep {sweep.name}", "", *table.markdown()]
        if self.chosen is None:
            finished = all(len(self.values(values)) == sweep.seeds for values in self.candidates)
            why = "No candidate has a value: nothing is chosen." if finished else "Not finished: nothing is chosen yet."
            broken = ["", "Not made, or failed otherwise than by diverging:", ""] if self.broken else []
            return "\n".join([*lines, "", why, *broken, *(f"- {name}" for name in self.broken)]) + "\n"
        scale = f", scale {sweep.point[SCALE]}" if sweep.point else ""
        where = " on validation samples" if self._validates else ""
        end = ", at the end of the grid" if at_an_end(self.chosen, self.candidates) else ""
        rest = "; ".join(f"{named(v)}: {score_text(self.values(v))}" for v in self.candidates if v != self.chosen)
        note = (
            f"{CHOSEN}{named(self.chosen)} by sweeps/{sweep.path.name} ({sweep.best} {sweep.value}{where}{scale}, "
            f"{sweep.seeds} seed{'s' if sweep.seeds > 1 else ''}): {score_text(self.values(self.chosen))}{end}"
            f"{f'; others: {rest}' if rest else ''}"
        )
        return "\n".join([*lines, "", "For the method's config file:", "", f"    {note}"]) + "\n"

    @property
    def _validates(self) -> bool:
        """Whether candidates are compared on samples set aside, instead of the test sets."""
        experiment = self.resolver.experiment(self.sweep.arguments(self.chosen or ()))
        return bool(experiment["data"].get("evaluate_on") == "validation")


def _number_of(result: Result, value: str, path: Path) -> float:
    """Return the value of an expression for a run.

    Raises:
        Undefined: the run has no value.
        ConfigError: the expression does not give a number.
    """
    try:
        found = result.figure(value)
    except Undefined:
        raise
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}, select.value", value, f"an expression that gives a number ({error})") from None
    if not _is_number(found):
        kind = "a list" if isinstance(found, list) else type(found).__name__
        raise ConfigError(f"{path}, select.value", value, f"an expression that gives a number, not {kind}")
    return float(found)
