"""``cfl sweep --choose``: chooses each method's values by runs on validation samples with seeds of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cfl.metrics.base import Figure
from cfl.metrics.measure import measure_of
from cfl.reporting.compare.reading import read
from cfl.reporting.compare.rows import figure_of
from cfl.reporting.measures import ON_VALIDATION
from cfl.running.finished import Finished, Results
from cfl.running.grid import Values, named, setting
from cfl.running.jobs import Wanted
from cfl.running.resolving import Resolver
from cfl.running.selection import at_an_end, best_of, candidates_table, mean_of, scores_of
from cfl.runtime.errors import ConfigError
from cfl.runtime.printable import in_markdown

FILE = "chosen.md"
"""The file in the sweep's folder that says what was chosen."""
_FOLDER = "choosing"

Settings = Mapping[Values, Wanted]
"""The combinations of values with which a method may be tested -> the experiment that does."""


class Chosen(NamedTuple):
    """What is chosen, as far as the runs that choose are finished.

    Attributes:
        tests: the experiment of each method with its best values.
        notes: a line for each such method with several combinations, for the tables.
        lacking: a line for each method of which nothing is chosen.
        report: the candidates and what is chosen of them, as Markdown.
    """

    tests: list[Wanted]
    notes: list[str]
    lacking: list[str]
    report: str


class Choice:
    """Compares each method's combinations of values on validation samples; of equal ones the first is the best.

    A combination with a run that diverged or lacks the figure is worse than any number. A method with a single
    combination is tested with it.

    Args:
        key: figure by which combinations are compared, such as ``acc``.
        seeds: seeds of the runs that choose.
        methods: name -> its combinations, at least one.
        out: the sweep's folder.
        resolver: resolves configurations.

    Raises:
        ConfigError: the figure is unknown, there is nothing to choose, values are of several problems, no samples are
            set aside, or tests are on them.
    """

    def __init__(
        self,
        key: str,
        seeds: Sequence[int],
        methods: Mapping[str, Settings],
        out: Path,
        resolver: Resolver,
    ) -> None:
        self.seeds, self._methods, self._resolver = seeds, methods, resolver
        if all(len(settings) == 1 for settings in methods.values()):
            raise ConfigError("--choose", key, "--set KEY=V1,V2 beside it, with values to choose from")
        self._figures = [self._figure(key, settings) for settings in methods.values()]
        self._compared = {
            test.name: test._replace(
                name=f"{test.name} {ON_VALIDATION}",
                arguments=(*test.arguments, setting("data.evaluate_on", "validation")),
                above=out / _FOLDER,
            )
            for settings in methods.values()
            for test in settings.values()
            if len(settings) > 1
        }

    def _figure(self, key: str, settings: Settings) -> Figure:
        """The figure of a method's runs, after a check of their data."""
        first, *others = settings
        data = self._resolver.config(settings[first].arguments)["data"]
        for values in others:
            if self._resolver.config(settings[values].arguments)["data"] != data:
                option = next(pair[0] for pair, before in zip(values, first, strict=True) if pair != before)
                raise ConfigError("--set", option, "values of one problem with --choose; a sweep for each problem")
        if data["evaluate_on"] != "test":
            valid = "test with --choose, which itself sets validation for the runs that choose"
            raise ConfigError("data.evaluate_on", data["evaluate_on"], valid)
        if not data["validation"]:
            valid = "above 0 with --choose, e.g. 0.1: the share of samples by which values are chosen"
            raise ConfigError("data.validation", data["validation"], valid)
        measure = measure_of(data["scenario"])
        figures = {one.key: one for one in measure.columns if one.better and one.key in measure.formulas}
        if key not in figures:
            raise ConfigError("--choose", key, f"one of {', '.join(figures)}")
        return figures[key]

    @property
    def wanted(self) -> list[Wanted]:
        """The experiments of the runs that choose."""
        return [*self._compared.values()]

    def chosen(self, results: Results[Finished]) -> Chosen:
        """Choose by the finished and diverged runs.

        Raises:
            RunFolderError: a run that is finished is damaged.
        """
        found = Chosen([], [], [], "")
        seeds = f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"
        lines = ["# Chosen values", ""]
        for (name, settings), figure in zip(self._methods.items(), self._figures, strict=True):
            if len(settings) == 1:
                found.tests.extend(settings.values())
                lines += [f"## {in_markdown(name)}", "", "One combination of values: nothing to choose.", ""]
                continue
            rule = f"{'highest' if figure.better == 'higher' else 'lowest'} {figure.key} {ON_VALIDATION} ({seeds})"
            scored = [(values, self._scores(test, figure, results)) for values, test in settings.items()]
            best = best_of([(values, mean_of(of, len(self.seeds))) for values, of in scored], figure.better == "higher")
            if best is None:
                run = all(len(of) == len(self.seeds) for _, of in scored)
                said = f"nothing is chosen: {'no combination has a value' if run else 'runs that choose are lacking'}"
                found.lacking.append(f"{name}: {said}")
            else:
                tried = {key: dict.fromkeys(str(dict(values)[key]) for values in settings) for key, _ in best}
                among = "; ".join(named(((key, ", ".join(values)),)) for key, values in tried.items())
                end = named(at_an_end(best, settings))
                beyond = f"; {end} is at an end of what was tried, a better value may lie beyond" if end else ""
                said = f"{named(best)} has the {rule} among {among}{beyond}"
                found.tests.append(settings[best])
                found.notes.append(f"{name}: {said}")
            table = candidates_table(scored, best, figure.key, figure.decimals)
            lines += [f"## {in_markdown(name)}", "", *table.markdown(), "", f"{in_markdown(said)}.", ""]
        return found._replace(report="\n".join(lines))

    def _scores(self, test: Wanted, figure: Figure, results: Results[Finished]) -> dict[int, float | str]:
        def value(run: Finished) -> float | str:
            number = figure_of(read(run.folder, []), figure.key)
            return number if number is not None and math.isfinite(number) else "undefined"

        return scores_of(self._resolver.experiment(self._compared[test.name].arguments), self.seeds, results, value)
