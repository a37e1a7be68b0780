"""The rows of a comparison: runs that are averaged over their seeds, and the numbers of these runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from cfl.metrics.base import Better, own_key
from cfl.metrics.measure import MEASURES, measure_named
from cfl.metrics.transfer import transfers
from cfl.reporting.compare.reading import Reading
from cfl.reporting.line_styles import LineStyle, line_styles
from cfl.reporting.measures import Figure
from cfl.reporting.run_folder import Run

T = TypeVar("T")

_OVER_TASKS = frozenset(figure.key for measure in MEASURES for figure in measure.columns)


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in the seed only, or in what ``--group-by`` leaves out.

    Attributes:
        label: unique in its table; rows with the same settings have the same label in every table.
        method: the runs' method, as the configuration names it; several methods are joined by ``|``.
        readings: the runs, at least one.
    """

    label: str
    method: str
    readings: Sequence[Reading]

    def _of_seeds(self, value: Callable[[Reading], T | None]) -> dict[int, list[T]]:
        """Return seed -> the values of its runs, seeds ascending, without seeds that have no value."""
        found: dict[int, list[T]] = {}
        for reading in self.readings:
            if (one := value(reading)) is not None:
                found.setdefault(reading.run.seed, []).append(one)
        return dict(sorted(found.items()))

    def by_seed(self, value: Callable[[Reading], float | None]) -> dict[int, float]:
        """Return seed -> mean value of its runs, seeds ascending, without seeds that have no value."""
        return {seed: sum(values) / len(values) for seed, values in self._of_seeds(value).items()}

    def figure(self, figure: Figure) -> dict[int, float]:
        """A figure's values, as :meth:`by_seed`."""
        return self.by_seed(lambda reading: figure_of(reading, figure.key))

    def matrices(self, measure: str) -> list[np.ndarray]:
        """Return for each seed the mean matrix ``[T, T]`` of its runs; empty if there is none or T differs."""
        return self._means(lambda reading: reading.matrices.get(measure))

    def means_over_tasks_seen(self, measure: str) -> list[np.ndarray]:
        """Mean after each task, ``[T]``, for the same seeds as :meth:`matrices`."""
        return self._means(
            lambda reading: means_over_tasks_seen_in_run(reading, measure) if measure in reading.matrices else None
        )

    def _means(self, value: Callable[[Reading], np.ndarray | None]) -> list[np.ndarray]:
        found = self._of_seeds(value).values()
        if len({values.shape for several in found for values in several}) > 1:
            return []
        return [np.mean(several, axis=0) for several in found]

    def of_measure(self, measure: str) -> Row | None:
        """Return the row with only the runs that have this measure, given by name; None if there are none."""
        readings = [reading for reading in self.readings if reading.run.measure == measure]
        return Row(self.label, self.method, readings) if readings else None

    def with_curves(self, measure: str) -> list[Run]:
        """The runs that have a learning curve of a measure."""
        return [reading.run for reading in self.readings if reading.run.curve and reading.run.measure == measure]

    def curves(self, measure: str) -> np.ndarray:
        """Return learning curves ``[seeds, rounds]``, cut to the shortest, NaN for rounds without an evaluation.

        A seed with several runs has the mean of their curves.
        """
        runs = self.with_curves(measure)
        found = self._of_seeds(lambda reading: reading.run.curve if reading.run in runs else None).values()
        shortest = min((len(curve) for several in found for curve in several), default=0)
        means = [np.mean([np.array(curve[:shortest], float) for curve in several], axis=0) for several in found]
        return np.array(means).reshape(len(means), shortest)

    @property
    def seeds(self) -> list[int]:
        """The seeds, ascending."""
        return sorted({reading.run.seed for reading in self.readings})


@dataclass(frozen=True, eq=False)
class Comparison:
    """One table.

    Attributes:
        title: what problem is solved.
        rows: the rows, in order of appearance.
        notes: a line for each thing that makes rows less comparable than they look, or that the caller says of them.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]

    def baseline(self, name: str | None) -> Row | None:
        """The row against which differences are taken.

        Args:
            name: label or method of the row. None takes ``fedavg``, or without such a row the first label in
                alphabetical order. Of several rows of a method, the one with most seeds in common with others is taken.

        Returns:
            None if there is no such row, or only one row in the table.
        """
        found = self._called(name)
        if found:
            return max(found, key=self._seeds_in_common)
        return min(self.rows, key=lambda row: row.label) if name is None and len(self.rows) > 1 else None

    def about_baseline(self, name: str | None) -> list[str]:
        """Return notes: the other rows that :meth:`baseline` could have chosen, and a lack of common seeds."""
        row, lines = self.baseline(name), []
        if row is None:
            return []
        others = [one for one in self._called(name) if one is not row]
        if others:
            labels = ", ".join(repr(one.label) for one in others)
            lines.append(f"differences are to {row.label!r}; --baseline takes others by their labels: {labels}")
        if any(len(one.seeds) > 1 for one in self.rows) and not self._seeds_in_common(row):
            lines.append(f"no row has two seeds in common with {row.label!r}, so there are no differences to it")
        return lines

    def _called(self, name: str | None) -> list[Row]:
        wanted = "fedavg" if name is None else name
        if len(self.rows) < 2:
            return []
        return [row for row in self.rows if row.label == wanted] or [row for row in self.rows if row.method == wanted]

    def _seeds_in_common(self, row: Row) -> int:
        """Return the number of paired differences to a row over all others; a single common seed does not count."""
        common = [len({*row.seeds} & {*other.seeds}) for other in self.rows if other is not row]
        return sum(number for number in common if number > 1)


Compared = Sequence[tuple[Comparison, Row | None]]
"""Tables, each with the row against which its differences are taken."""


def styles_of(comparisons: Iterable[Comparison]) -> dict[str, LineStyle]:
    """Return label -> style, the same in all tables and pictures."""
    return line_styles({row.label: row.method for comparison in comparisons for row in comparison.rows})


def own_measures(comparisons: Iterable[Comparison]) -> dict[str, Better]:
    """Name of each of the users' measures of any run -> which values are better."""
    readings = [reading for comparison in comparisons for row in comparison.rows for reading in row.readings]
    return {name: better for reading in readings for name, better in reading.run.own_measures.items()}


def figure_of(reading: Reading, key: str) -> float | None:
    """Return a run's figure by its key in ``summary.json``, None if undefined.

    For a measure other than accuracy, an FGT, BWT or FWT that the summary lacks is computed from the matrix. A run that
    stopped before its last task has no figures over all tasks.
    """
    if (key in _OVER_TASKS or key.startswith(own_key(""))) and lacks_tasks(reading.run):
        return None
    value = reading.run.others.get(key, getattr(reading.run, key, None))
    if value is None and (found := _transfers(reading.run).get(key)) is not None:
        return found
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def lacks_tasks(run: Run) -> bool:
    """Return whether a run ended before its last task."""
    return run.stopped_early and run.begun < run.tasks


def lacks_rounds(run: Run) -> bool:
    """Return whether a run ended early in its last task without having reached all its target accuracies."""
    aims = run.rounds_to_accuracy.values()
    return run.stopped_early and not lacks_tasks(run) and (not aims or None in aims)


def _transfers(run: Run) -> dict[str, float]:
    """Compute FGT, BWT and FWT of a run without accuracies from its matrix, under keys such as ``nll_bwt``.

    Undefined ones are left out. The result is empty if clients have matrices of their own.
    """
    measure = measure_named(run.measure)
    if measure.is_accuracy or "clients_evaluated" in run.others:
        return {}
    initial = torch.full_like(run.matrix[0], math.nan) if run.initial is None else run.initial
    found = transfers(run.matrix, initial, measure.lower_is_better)
    return {f"{measure.figure}_{name}": float(value) for name, value in found.items() if not value.isnan()}


def means_over_tasks_seen(matrix: np.ndarray) -> np.ndarray:
    """``mean over i <= t of a[t, i]`` for every t: ``[..., T, T]`` to ``[..., T]``, NaN where a term is missing."""
    tasks = matrix.shape[-1]
    return np.stack([matrix[..., t, : t + 1].mean(-1) for t in range(tasks)], axis=-1)


def means_over_tasks_seen_in_run(reading: Reading, measure: str) -> np.ndarray:
    """Mean after each task, ``[T]``: where clients have matrices of their own, the run's mean over them."""
    means = means_over_tasks_seen(reading.matrices[measure])
    if measure != reading.run.measure or not reading.run.means:
        return means
    known = np.array(reading.run.means)
    return np.where(np.isnan(known), means, known)
