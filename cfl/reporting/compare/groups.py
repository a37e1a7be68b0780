"""Arrange runs in tables and rows, and note what makes rows less comparable."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cfl.metrics.base import own_key
from cfl.metrics.measure import measure_of
from cfl.reporting.compare.reading import Reading
from cfl.reporting.compare.rows import Comparison, Row, figure_of, lacks_rounds, lacks_tasks
from cfl.reporting.compare.settings import differing, short_names, shown
from cfl.reporting.measures import ON_VALIDATION, figures_with
from cfl.reporting.method_names import printed
from cfl.runtime.errors import ConfigError

OF_A_TABLE = ("benchmark", "partition", "scenario")
"""Keys that say what problem is solved. Runs that differ in one of them are in different tables."""
DEFAULT_KEYS = (*OF_A_TABLE, "method")
_OF_A_RUN = (*DEFAULT_KEYS, "participation", "tasks", "clients", "rounds")
_NAMED_AT_MOST = 3  # settings in the name of a row
_LONGEST_VALUE = 16  # characters of a setting in the name of a row
_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def setting_of(reading: Reading, key: str) -> Any:
    """The value of a grouping key; None where the run has no such setting."""
    if key not in _OF_A_RUN:
        return reading.settings.get(key)
    if key == "rounds" and reading.run.stopped_early:
        return None
    return getattr(reading.run, key) if hasattr(reading.run, key) else reading.run.others.get(key)


def on_validation(reading: Reading) -> bool:
    """Whether a run's figures are of samples that clients set aside, and not of the test sets."""
    return bool(reading.settings.get("data.evaluate_on") == "validation")


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


def check_directions(readings: Sequence[Reading]) -> None:
    """Refuse runs that have different measures under one name: higher values are better in one, lower in another.

    Raises:
        ConfigError: names the measure and two such runs.
    """
    first: dict[str, Reading] = {}
    for reading in readings:
        for name, better in reading.run.own_measures.items():
            other = first.setdefault(name, reading)
            if (known := other.run.own_measures[name]) != better:
                found = f"{known} is better in {other.run.folder}, {better} in {reading.run.folder}"
                raise ConfigError(own_key(name), found, "runs with one measure under one name: compare these apart")


def compare(readings: Sequence[Reading], keys: Sequence[str] | None = None) -> list[Comparison]:
    """Arrange runs in tables and rows.

    Figures on validation samples are in tables of their own.

    Args:
        readings: finished runs.
        keys: runs that agree in all keys are averaged over their seeds. Keys of :data:`OF_A_TABLE` make tables, others
            rows. None takes :data:`DEFAULT_KEYS`, and also separates tables by the numbers of tasks and clients, and
            rows of one method by their settings.

    Raises:
        ConfigError: a key that no run has, or measures that :func:`check_directions` refuses.
    """
    check_directions(readings)
    given = DEFAULT_KEYS if keys is None else tuple(keys)
    check_keys(given, readings)
    of_table = [key for key in given if key in OF_A_TABLE] + ([] if keys is not None else ["tasks", "clients"])
    of_row = [key for key in given if key not in OF_A_TABLE]
    tables = _split(readings, lambda r: (on_validation(r), *(shown(setting_of(r, key)) for key in of_table)))
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
        parts += [ON_VALIDATION] * on_validation(first)
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
        unknown = [reading for reading in members if not reading.run.config_hash]
        if tell_apart and _repeats_a_seed(unknown):  # which of these have the same settings cannot be told
            rows += _one_by_one(label, method, unknown)
            members = [reading for reading in members if reading.run.config_hash]
            if not members:
                continue
        differ = list(differing([reading.settings for reading in members]))
        several_methods = len({reading.run.method for reading in members}) > 1
        if tell_apart and (differ or _mixes_experiments(members)):
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


def _mixes_experiments(readings: Sequence[Reading]) -> bool:
    """Whether two runs of one seed are of different experiments. Runs of different seeds have different hashes."""
    runs = [reading.run for reading in readings]
    return len({(run.seed, run.config_hash) for run in runs}) > len({run.seed for run in runs})


def _held_by_some(several: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for settings in several for key in settings)
    return [key for key in keys if not all(key in settings for settings in several)]


def samples_of(reading: Reading) -> str:
    """Return a text that identifies the samples of a run's tasks, empty if its summary has none."""
    digests = reading.run.others.get("data_digests")
    return json.dumps(digests, sort_keys=True) if digests else ""


def _without_repetitions(readings: Sequence[Reading]) -> tuple[list[Reading], list[str]]:
    """Return one run of each experiment, the one of which more is known, and notes on the runs left out.

    A repetition of an experiment with the same seed would not be an independent sample. Runs without a configuration,
    which are built in Python, repeat no other.
    """
    kept: dict[tuple[str, int], list[Reading]] = {}
    notes = []
    for reading in readings:
        run = reading.run
        alike = kept.setdefault((run.config_hash or str(run.folder), run.seed), [])
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
    """Return whether the configuration could be read, the number of targets and figures, and whether there is a curve.

    Figures may differ between repetitions, as a user's measures, for example, are no part of an experiment.
    """
    figures = [figure_of(reading, figure.key) for figure in figures_with(reading.run.own_measures)]
    known = len(reading.run.rounds_to_accuracy) + sum(value is not None for value in figures)
    return bool(reading.settings), known, bool(reading.run.curve)


def _one_by_one(label: str, method: str, readings: Sequence[Reading]) -> list[Row]:
    """Return a row for each of several runs, named after its folder."""
    folders = [reading.run.folder.resolve() for reading in readings]
    above = os.path.commonpath(folders)
    return [
        Row(f"{label} ({folder.relative_to(above)})", method, [reading])
        for folder, reading in zip(folders, readings, strict=True)
    ]


def _variants(label: str, method: str, readings: Sequence[Reading], keys: Sequence[str]) -> list[Row]:
    """Return a row for each combination of settings in which runs of one method differ, named after the settings.

    Two runs of one seed that do not differ in ``keys``, but are of different experiments, are told apart by options
    that only some of the runs have, as the others are from before the option existed; or else by their folders.
    """

    def of_one_setting() -> list[list[Reading]]:
        return _split(readings, lambda reading: tuple(shown(reading.settings.get(key)) for key in keys))

    mixed = [members for members in of_one_setting() if _mixes_experiments(members)]
    held = {key: None for members in mixed for key in _held_by_some([reading.settings for reading in members])}
    keys = [*dict.fromkeys([*keys, *held])]
    names = short_names(keys)
    named = _telling_apart([reading.settings for reading in readings], keys)
    rows: list[Row] = []
    for members in of_one_setting():
        settings = members[0].settings
        words = [f"{names[key]} {_brief(shown(settings[key]))}" for key in named if key in settings]
        text = f"{label} ({', '.join(words)})" if words else label
        if _mixes_experiments(members):
            rows += _one_by_one(text, method, members)
            continue
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
    if _CLASS_PATH.fullmatch(text):  # its end is what tells
        return text
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
        for run in (reading.run for reading in row.readings if lacks_tasks(reading.run)):
            what = f"stopped in task {run.begun - 1} (of 0 to {run.tasks - 1}), and has no figures over all tasks"
            notes.append(f"{row.label}, seed {run.seed}: {what}")
        if cut := [reading.run for reading in row.readings if lacks_rounds(reading.run)]:
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
