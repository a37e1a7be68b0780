"""Arrange runs in tables, average them in rows, and note what makes rows less comparable."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from cfl.metrics.measure import MEASURES, called, measure_of
from cfl.metrics.transfer import transfers
from cfl.reporting.compare.reading import Reading
from cfl.reporting.compare.settings import differing, short_names, shown
from cfl.reporting.line_styles import LineStyle, line_styles
from cfl.reporting.measures import Figure
from cfl.reporting.method_names import printed
from cfl.reporting.run_folder import Run
from cfl.runtime.errors import ConfigError

T = TypeVar("T")

OF_A_TABLE = ("benchmark", "partition", "scenario")
"""Keys that say what problem is solved. Runs that differ in one of them are in different tables."""
DEFAULT_KEYS = (*OF_A_TABLE, "method")
_OF_A_RUN = (*DEFAULT_KEYS, "participation", "tasks", "clients", "rounds")
_OVER_TASKS = frozenset(figure.key for measure in MEASURES for figure in measure.columns)
_NAMED_AT_MOST = 3  # settings in the name of a row
_LONGEST_VALUE = 16  # characters of a setting in the name of a row


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

    def seen(self, measure: str) -> list[np.ndarray]:
        """Mean after each task, ``[T]``, for the same seeds as :meth:`matrices`."""
        return self._means(lambda reading: seen_by(reading, measure) if measure in reading.matrices else None)

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
        notes: a line for each thing that makes rows less comparable than they look.
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


def figure_of(reading: Reading, key: str) -> float | None:
    """Return a run's figure by its key in ``summary.json``, None if undefined.

    For a measure other than accuracy, a missing mean, FGT, BWT or FWT is computed from the matrix. A run that stopped
    before its last task has no figures over all tasks.
    """
    if key in _OVER_TASKS and _lacks_tasks(reading.run):
        return None
    value = getattr(reading.run, key, None) if key not in reading.run.others else reading.run.others[key]
    of = next((measure.name for measure in MEASURES if measure.figure == key and not measure.is_accuracy), None)
    if value is None and of is not None and of in reading.matrices:
        last = seen_mean(reading.matrices[of])
        last = last[np.isfinite(last)]
        return float(last[-1]) if len(last) else None
    if value is None and (found := _transfers(reading.run).get(key)) is not None:
        return found
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _lacks_tasks(run: Run) -> bool:
    return run.stopped_early and run.begun < run.tasks


def _lacks_rounds(run: Run) -> bool:
    """Return whether a run ended early in its last task without having reached all its target accuracies."""
    aims = run.rounds_to_accuracy.values()
    return run.stopped_early and not _lacks_tasks(run) and (not aims or None in aims)


def _transfers(run: Run) -> dict[str, float]:
    """Compute FGT, BWT and FWT of a run without accuracies from its matrix, under keys such as ``nll_bwt``.

    Undefined ones are left out. The result is empty if clients have matrices of their own.
    """
    measure = called(run.measure)
    if measure.is_accuracy or "clients_evaluated" in run.others:
        return {}
    initial = torch.full_like(run.matrix[0], math.nan) if run.initial is None else run.initial
    found = transfers(run.matrix, initial, measure.lower_is_better)
    return {f"{measure.figure}_{name}": float(value) for name, value in found.items() if not value.isnan()}


def seen_mean(matrix: np.ndarray) -> np.ndarray:
    """``mean over i <= t of a[t, i]`` for every t: ``[..., T, T]`` to ``[..., T]``, NaN where a term is missing."""
    tasks = matrix.shape[-1]
    return np.stack([matrix[..., t, : t + 1].mean(-1) for t in range(tasks)], axis=-1)


def seen_by(reading: Reading, measure: str) -> np.ndarray:
    """Mean after each task, ``[T]``: where clients have matrices of their own, the run's mean over them."""
    means = seen_mean(reading.matrices[measure])
    if measure != reading.run.measure or not reading.run.means:
        return means
    known = np.array(reading.run.means)
    return np.where(np.isnan(known), means, known)


def setting_of(reading: Reading, key: str) -> Any:
    """The value of a grouping key; None where the run has no such setting."""
    if key not in _OF_A_RUN:
        return reading.settings.get(key)
    if key == "rounds" and reading.run.stopped_early:
        return None
    return getattr(reading.run, key) if hasattr(reading.run, key) else reading.run.others.get(key)


def check_keys(keys: Sequence[str], readings: Sequence[Reading]) -> None:
    """Refuse a grouping key that no run has.

    Raises:
        ConfigError: names the key and similar ones.
    """
    for key in keys:
        if key not in _OF_A_RUN and not any(key in reading.settings for reading in readings):
            end = key.rpartition(".")[2]
            near = sorted({k for r in readings for k in r.settings if k.rpartition(".")[2] == end})
            others = "a dotted key of a run's configuration that decides its results"
            raise ConfigError("--group-by", key, f"{', '.join(near or _OF_A_RUN)}, or {others}")


def compare(readings: Sequence[Reading], keys: Sequence[str] | None = None) -> list[Comparison]:
    """Arrange runs in tables and rows.

    Args:
        readings: finished runs.
        keys: runs that agree in all keys are averaged over their seeds. Keys of :data:`OF_A_TABLE` make tables, others
            rows. None takes :data:`DEFAULT_KEYS`, and also separates tables by the numbers of tasks and clients, and
            rows of one method by their settings.

    Raises:
        ConfigError: a key that no run has.
    """
    given = DEFAULT_KEYS if keys is None else tuple(keys)
    check_keys(given, readings)
    of_table = [key for key in given if key in OF_A_TABLE] + ([] if keys is not None else ["tasks", "clients"])
    of_row = [key for key in given if key not in OF_A_TABLE]
    tables = _split(readings, lambda reading: tuple(shown(setting_of(reading, key)) for key in of_table))
    names = _printed_names(readings)
    told = [key for key in ("tasks", "clients") if len({setting_of(r, key) for r in readings}) > 1 and key in of_table]
    comparisons = []
    for members in tables:
        first = members[0]
        parts = [shown(setting_of(first, key)) for key in of_table if key in OF_A_TABLE]
        parts = [
            measure_of(part).scenario_in_words(part) if key == "scenario" else part
            for part, key in zip(parts, of_table, strict=False)
        ]
        parts += [_counted(setting_of(first, key), key) for key in told]
        rows, pooled = _rows(members, of_row, names, tell_apart=keys is None)
        comparisons.append(Comparison(", ".join(parts) or "all runs", rows, [*pooled, *_notes(rows)]))
    return comparisons


def _counted(count: int, things: str) -> str:
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def _split(readings: Iterable[Reading], key: Callable[[Reading], Any]) -> list[list[Reading]]:
    found: dict[Any, list[Reading]] = {}
    for reading in readings:
        found.setdefault(key(reading), []).append(reading)
    return list(found.values())


def _printed_names(readings: Sequence[Reading]) -> dict[str, str]:
    """Return method -> its printed name, or the configuration's name if another method is printed alike."""
    found: dict[str, set[str]] = {}
    for reading in readings:
        method = reading.run.method
        keys = {name: f"methods.{name}" for name in method.split("+")}
        classes = {name: shown(reading.settings[key]) for name, key in keys.items() if key in reading.settings}
        found.setdefault(method, set()).add(printed(method, classes))
    times = Counter(name for names in found.values() for name in names)
    own = {method: next(iter(names)) for method, names in found.items() if len(names) == 1}
    return {method: own[method] if method in own and times[own[method]] == 1 else method for method in found}


def _rows(
    readings: Sequence[Reading], keys: Sequence[str], printed_names: Mapping[str, str], tell_apart: bool
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for members in _split(readings, lambda reading: tuple(shown(setting_of(reading, key)) for key in keys)):
        methods = dict.fromkeys(reading.run.method for reading in members)
        method, printed_method = "|".join(methods), "|".join(printed_names[name] for name in methods)
        others = [key for key in keys if key != "method"]
        names = short_names(others)
        words = [f"{names[key]} {shown(setting_of(members[0], key))}" for key in others]
        label = ", ".join(words) or printed_method
        if words and "method" in keys:
            label = f"{printed_method} ({label})"
        members, twice = _without_repetitions(members)
        notes += twice
        differ = list(differing([reading.settings for reading in members]))
        several_methods = len({reading.run.method for reading in members}) > 1
        if not differ and not several_methods and _repeats_a_seed(members):
            # Two runs of one seed differ only in options that some runs lack, because those are from before the option
            # existed. Then these options tell the runs apart.
            differ = _held_by_some([reading.settings for reading in members])
        if tell_apart and differ:
            rows += _variants(label, method, members, differ)
        else:
            if several_methods:
                differ.insert(0, "method")
            if differ or _repeats_a_seed(members):
                what = _listed(differ) or "nothing that their configurations show"
                notes.append(f"{label}: averaged over runs that differ in {what}")
            rows.append(Row(label, method, members))
    return rows, notes


def _repeats_a_seed(readings: Sequence[Reading]) -> bool:
    return len({reading.run.seed for reading in readings}) < len(readings)


def _held_by_some(several: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for settings in several for key in settings)
    return [key for key in keys if not all(key in settings for settings in several)]


def samples_of(reading: Reading) -> str:
    """Return a text that identifies the samples of a run's tasks, empty if its summary has none."""
    digests = reading.run.others.get("data_digests")
    return json.dumps(digests, sort_keys=True) if digests else ""


def _without_repetitions(readings: Sequence[Reading]) -> tuple[list[Reading], list[str]]:
    """Return one run of each experiment, the one of which more is known, and notes on the runs left out.

    A repetition of an experiment with the same seed would not be an independent sample.
    """
    kept: dict[tuple[str, int], list[Reading]] = {}
    notes = []
    for reading in readings:
        alike = kept.setdefault((reading.run.config_hash, reading.run.seed), [])
        samples = samples_of(reading)
        first = next((one for one in alike if not samples or samples_of(one) in (samples, "")), None)
        if first is None:
            alike.append(reading)
        else:
            kept_one, other = (reading, first) if _known_of(reading) > _known_of(first) else (first, reading)
            alike[alike.index(first)] = kept_one
            notes.append(f"{other.run.folder} repeats the experiment of {kept_one.run.folder} and is left out")
    return [reading for alike in kept.values() for reading in alike], notes


def _known_of(reading: Reading) -> tuple[bool, int, bool]:
    """Return whether the configuration could be read, the number of targets, and whether there is a curve."""
    return bool(reading.settings), len(reading.run.rounds_to_accuracy), bool(reading.run.curve)


def _variants(label: str, method: str, readings: Sequence[Reading], keys: Sequence[str]) -> list[Row]:
    """Return a row for each combination of settings in which runs of one method differ, named after the settings."""
    names = short_names(keys)
    named = _telling_apart([reading.settings for reading in readings], keys)
    rows: list[Row] = []
    for members in _split(readings, lambda reading: tuple(shown(reading.settings.get(key)) for key in keys)):
        settings = members[0].settings
        words = [f"{names[key]} {_brief(shown(settings[key]))}" for key in named if key in settings]
        text = f"{label} ({', '.join(words)})" if words else label
        alike = sum(row.label == text or row.label.startswith(f"{text} #") for row in rows)
        rows.append(Row(f"{text} #{alike + 1}" if alike else text, method, members))
    return rows


def _telling_apart(several: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return at most ``_NAMED_AT_MOST`` keys in their order, chosen to tell as many settings apart as possible."""

    def kinds(chosen: Sequence[str]) -> int:
        return len({tuple(shown(settings.get(key)) for key in chosen) for settings in several})

    chosen: list[str] = []
    while len(chosen) < min(_NAMED_AT_MOST, len(keys)):
        chosen.append(max((key for key in keys if key not in chosen), key=lambda key: kinds([*chosen, key])))
    return [key for key in keys if key in chosen]


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1].rstrip()}…"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    rounds = {setting_of(reading, "rounds") for row in rows for reading in row.readings} - {None}
    if len(rounds) > 1:
        notes.append(f"different numbers of rounds are compared: {', '.join(map(str, sorted(rounds)))}")
    keys = differing([reading.settings for row in rows for reading in row.readings])
    common = [key for key in keys if not key.startswith("methods.")]
    if len(rows) > 1 and common:
        notes.append(f"rows differ in more than the method: {_listed(common)}")
    for row in rows:
        for run in (reading.run for reading in row.readings if _lacks_tasks(reading.run)):
            what = f"stopped in task {run.begun} of {run.tasks}, and has no figures over all tasks"
            notes.append(f"{row.label}, seed {run.seed}: {what}")
        if cut := [reading.run for reading in row.readings if _lacks_rounds(reading.run)]:
            what = ", ".join(f"seed {run.seed} after {run.rounds:,}" for run in cut)
            notes.append(f"{row.label}: stopped by the privacy budget before the last round: {what}")
    seeds = {tuple(row.seeds) for row in rows}
    if len(seeds) > 1:
        notes.append("rows have different seeds: means are over each row's own, differences and ranks over common ones")
    readings = [reading for row in rows for reading in row.readings]
    for identity, what in (
        (samples_of, "tasks do not have the same samples in all runs"),
        (lambda reading: reading.partition, "clients do not hold the same samples in all rows"),
    ):
        unlike = _seeds_unlike(readings, identity)
        if unlike:
            notes.append(f"{what}: seed {', '.join(map(str, unlike))}")
    return notes


def _seeds_unlike(readings: Sequence[Reading], identity: Callable[[Reading], str]) -> list[int]:
    """Return the seeds, ascending, whose runs have different identities; an empty text equals any identity."""
    found: dict[int, set[str]] = {}
    for reading in readings:
        found.setdefault(reading.run.seed, set()).add(identity(reading))
    return [seed for seed, values in sorted(found.items()) if len(values - {""}) > 1]


def _listed(keys: Sequence[str], most: int = 5) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")
