"""Read the summary, matrix and learning curve of a run from its run folder.

The folder of a finished run holds at least two files:

- ``summary.json``: an object with the keys of :data:`SUMMARY_KEYS`. ``acc``, ``fgt``, ``fgt_max``, ``bwt`` and
  ``fwt`` are those of :attr:`cfl.metrics.measures.accuracy.Accuracy.formulas`, null where undefined. ``used_space``
  (percent or null) and ``rounds_to_accuracy`` (target in percent -> rounds or null) may be absent. Other keys are
  kept as they are.
- ``accuracy_matrix.csv``: see :func:`cfl.reporting.matrix_file.write_matrix_csv`.

A run with another measure has no accuracies. Its summary has the figure of that measure, such as ``nll``, instead of
the five, and its matrix is named after the measure, such as ``nll_matrix.csv``.

If there is a learning curve, the folder also holds ``rounds.csv``: see :func:`read_rounds`. Further files are read by
:mod:`cfl.reporting.compare.reading`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from cfl.metrics.base import Better
from cfl.metrics.measure import ACCURACY, MEASURES, Measure, called
from cfl.reporting.checksums import check_unchanged
from cfl.reporting.csv_file import RunFolderError, index_in, number_in, open_file, read_csv
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.measures import CURVES
from cfl.reporting.names import is_method_name
from cfl.runtime.run_files import CONFIG, ROUNDS, SUMMARY, matrix_file

_LARGEST = 1e100
"""Bound on the magnitude of fractional numbers in a summary: squares of larger ones might not be finite."""
_TEXT, _COUNT, _NUMBER, _NUMBER_OR_NULL = "text", "an integer from 0", "a number from 0", "a number or null"
SUMMARY_KEYS: dict[str, str] = {
    "method": _TEXT,
    "benchmark": _TEXT,
    "partition": _TEXT,
    "scenario": _TEXT,
    "seed": _COUNT,
    "acc": _NUMBER_OR_NULL,
    "fgt": _NUMBER_OR_NULL,
    "fgt_max": _NUMBER_OR_NULL,
    "bwt": _NUMBER_OR_NULL,
    "fwt": _NUMBER_OR_NULL,
    "uplink_bytes": _COUNT,
    "downlink_bytes": _COUNT,
    "seconds": _NUMBER,
    "rounds": _COUNT,
    "tasks": _COUNT,
    "clients": _COUNT,
    "config_hash": _TEXT,
}
"""Keys of ``summary.json`` and the kinds of their values. Only runs with a measure other than accuracy may lack
``acc``, ``fgt``, ``fgt_max``, ``bwt`` and ``fwt``."""
_OF_ACCURACY = ("acc", "fgt", "fgt_max", "bwt", "fwt")

ROUND_COLUMNS = (*CURVES.values(), "uplink_bytes", "seconds", "task")
"""Columns of ``rounds.csv`` that are read: the mean of each measure, such as ACC in percent, bytes sent and seconds
passed so far, and the task of the round."""
_MOST_ROUNDS = 10**7


@dataclass(frozen=True, eq=False)
class Run:
    """One finished run as read from its folder.

    Attributes:
        folder: the run folder.
        method: name of the method or methods.
        benchmark: name of the task stream.
        partition: how samples were dealt to clients.
        scenario: the run's ``data.scenario``, such as ``class``.
        seed: the run's seed.
        acc: ACC in percent; None where undefined, like the following four.
        fgt: FGT in points, diagonal form.
        fgt_max: FGT in points against the best earlier accuracy.
        bwt: BWT in points.
        fwt: FWT in points.
        uplink_bytes: sent by all clients over all rounds.
        downlink_bytes: received by all clients over all rounds.
        seconds: duration of the run.
        rounds: number of communication rounds.
        tasks: number of tasks T.
        clients: number of clients.
        config_hash: identifies the configuration.
        used_space: share of the input space that a subspace method uses up, in percent; None for other methods.
        matrix: ``[T, T]`` float64 accuracy matrix in percent, NaN where not evaluated.
        initial: ``[T]`` accuracies before training in percent, or None where the file has none.
        means: the measure's mean after each task, NaN if ``rounds.csv`` lacks it. It may differ from the mean of
            ``matrix`` if clients have matrices of their own. Empty if there is one matrix for all clients.
        curve: ACC in percent, or the mean of another ``measure``, after each round; None after rounds without an
            evaluation. Empty if the run was evaluated at task ends only and has no targets.
        rounds_to_accuracy: the run's targets: percent -> rounds until ACC first reached the target, None if never.
        stopped_early: whether the run ended once its targets were met, or before its privacy budget was exceeded.
            Then ``rounds`` is a result and not a setting.
        begun: number of tasks for which at least one round was run.
        measure: name of the :class:`cfl.metrics.measure.Measure` whose values the matrix holds.
        own_measures: name of each of a user's measures -> which values are better, ``higher`` or ``lower``.
        progress: bytes sent and seconds passed after each round, as in :func:`read_rounds`; empty like ``curve``.
        others: the remaining entries of ``summary.json``, unchecked.
    """

    folder: Path
    method: str
    benchmark: str
    partition: str
    scenario: str
    seed: int
    acc: float | None
    fgt: float | None
    fgt_max: float | None
    bwt: float | None
    fwt: float | None
    uplink_bytes: int
    downlink_bytes: int
    seconds: float
    rounds: int
    tasks: int
    clients: int
    config_hash: str
    used_space: float | None
    matrix: Tensor
    initial: Tensor | None
    means: Sequence[float] = ()
    curve: Sequence[float | None] = ()
    rounds_to_accuracy: Mapping[str, int | None] = field(default_factory=dict)
    stopped_early: bool = False
    begun: int = 0
    measure: str = "accuracy"
    own_measures: Mapping[str, Better] = field(default_factory=dict)
    progress: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    def rounds_to(self, target: str) -> int | None:
        """Return the rounds until ACC first reached ``target`` percent; None if it never did, or if that is unknown."""
        known = self.rounds_to_accuracy
        if target in known or not called(self.measure).is_accuracy:
            return known.get(target)
        return rounds_to(self.curve, float(target))


def read_rounds(path: Path) -> dict[str, list[float | None]]:
    """Read the columns of a run's ``rounds.csv`` that are compared over rounds.

    Args:
        path: ``rounds.csv``, with the column ``round``, from 0, and any of :data:`ROUND_COLUMNS`.

    Returns:
        Column -> its value after each round, None where the cell is empty. Rounds before the first row are None too: a
        run that was resumed without its earlier table has no rows for them. Empty if there is no such file.

    Raises:
        RunFolderError: an invalid value; the message names the file and the line.
    """
    if not path.exists():
        return {}
    header, lines = read_csv(path)
    if "round" not in header:
        raise RunFolderError(f"{path}: there is no column round")
    names = [name for name in ROUND_COLUMNS if name in header]
    if not names:
        return {}
    rows: list[list[float | None]] = []
    for line, row in lines:
        cells = dict(zip(header, row, strict=True))
        round = index_in(cells["round"], "round", path, line)
        if not rows and round < _MOST_ROUNDS:
            rows = [[None] * len(names)] * round
        if round != len(rows):
            raise RunFolderError(f"{path}, line {line}: round {round} where round {len(rows)} should be")
        rows.append([number_in(cells[name], path, line) if cells[name] else None for name in names])
    return {name: [row[k] for row in rows] for k, name in enumerate(names)}


def read_curve(path: Path) -> list[float | None]:
    """Return ACC in percent after each round, None for rounds without an evaluation (from :func:`read_rounds`)."""
    return read_rounds(path).get("acc", [])


def rounds_to(curve: Sequence[float | None], accuracy: float) -> int | None:
    """Return the number of rounds, from 1, after which a learning curve first reaches an accuracy.

    Only rounds with an evaluation are considered. ACC is first rounded to 6 digits behind the point, as in run folders,
    so that a mean which is too low only by a rounding error counts as reached.

    Args:
        curve: ACC in percent after each round, None where not evaluated.
        accuracy: in percent.

    Returns:
        None if the curve never reaches the accuracy.
    """
    return next((r for r, acc in enumerate(curve, start=1) if acc is not None and round(acc, 6) >= accuracy), None)


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's ``summary.json`` with all entries.

    Raises:
        RunFolderError: the file is missing or broken, or a key is missing or of the wrong type.
    """
    path = folder / SUMMARY
    check_unchanged(folder, SUMMARY)
    with open_file(path) as file:
        try:
            summary = json.load(
                file,
                parse_constant=_refuse_constant,
                parse_int=_int64,
                parse_float=_finite,
                object_pairs_hook=_without_repetitions,
            )
            json.dumps(summary, ensure_ascii=False).encode()  # refuses lone surrogates
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise RunFolderError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path}: must hold an object with the keys {', '.join(SUMMARY_KEYS)}")
    optional = () if _measure_of(summary).is_accuracy else _OF_ACCURACY
    missing = [key for key in SUMMARY_KEYS if key not in summary and key not in optional]
    if missing:
        raise RunFolderError(f"{path}: missing {', '.join(missing)}")
    for key in (*SUMMARY_KEYS, "used_space", *CURVES.values()):
        kind = SUMMARY_KEYS.get(key, _NUMBER_OR_NULL)
        if not _is(summary.get(key), kind):
            raise RunFolderError(f"{path}: {key} = {json.dumps(summary[key])} cannot be; valid: {kind}")
    return summary


def _measure_of(summary: Mapping[str, Any]) -> Measure:
    return next((measure for measure in MEASURES if measure.figure in summary), ACCURACY)


def read_run(folder: Path) -> Run:
    """Read one run.

    Args:
        folder: holds ``summary.json`` and ``accuracy_matrix.csv``, and ``rounds.csv`` where there is a learning curve.

    Raises:
        RunFolderError: the folder or a file is missing, broken, or changed since the run ended, or a key is missing or
            of the wrong type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder")
    path, summary = folder / SUMMARY, read_summary(folder)
    measure = _measure_of(summary)
    name = measure.name
    values: dict[str, Any] = {key: summary.get(key) for key in (*SUMMARY_KEYS, "used_space")}
    for file in (matrix_file(name), ROUNDS):
        check_unchanged(folder, file)
    matrix_path = folder / matrix_file(name)
    matrix, initial = read_matrix_csv(matrix_path)
    if len(matrix) != values["tasks"]:
        raise RunFolderError(f"{matrix_path}: {len(matrix)} tasks, but summary.json says tasks = {values['tasks']}")
    targets, stopped = summary.get("rounds_to_accuracy", {}), summary.get("stopped_early", False)
    if not isinstance(targets, dict) or not all(
        _is_number(name) and (rounds is None or _is(rounds, _COUNT)) for name, rounds in targets.items()
    ):
        valid = "target in percent -> an integer or null"
        raise RunFolderError(f"{path}: rounds_to_accuracy = {json.dumps(targets)} cannot be; valid: {valid}")
    if not isinstance(stopped, bool):
        raise RunFolderError(f"{path}: stopped_early = {json.dumps(stopped)} cannot be; valid: true or false")
    own = summary.get("measures", {})
    if not isinstance(own, dict) or not all(
        is_method_name(n) and better in get_args(Better) for n, better in own.items()
    ):
        raise RunFolderError(f"{path}: measures = {json.dumps(own)} cannot be; valid: names -> higher or lower")
    progress = read_rounds(folder / ROUNDS)
    if progress and (rows := len(next(iter(progress.values())))) != values["rounds"]:
        raise RunFolderError(f"{folder / ROUNDS}: {rows} rounds, but summary.json says rounds = {values['rounds']}")
    of_rounds = progress.get("task", [])
    for task in of_rounds:
        if task is not None and task not in range(values["tasks"]):
            raise RunFolderError(f"{folder / ROUNDS}: task {task:g} cannot be; valid: 0 to {values['tasks'] - 1}")
    begun = 1 + max((int(task) for task in of_rounds if task is not None), default=values["tasks"] - 1)
    curve = progress.get(measure.figure, [])
    matrix_values, figure = matrix[torch.isfinite(matrix)].tolist(), summary.get(measure.figure)
    for where, found in ((path, [figure]), (matrix_path, matrix_values), (folder / ROUNDS, curve)):
        _check_bounds(where, found, measure)
    means = _after_tasks(curve, of_rounds, values["tasks"]) if "clients_evaluated" in summary else []
    progress = {name: column for name, column in progress.items() if name not in (*CURVES.values(), "task")}
    # With at most one evaluation per task the curve adds nothing to the accuracy matrix.
    if not targets and sum(value is not None for value in curve) <= values["tasks"]:
        curve, progress = [], {}
    known = {*values, "rounds_to_accuracy", "stopped_early", "measures"}
    others = {key: value for key, value in summary.items() if key not in known}
    values |= {
        "curve": curve,
        "begun": begun,
        "rounds_to_accuracy": targets,
        "stopped_early": stopped,
        "measure": name,
        "own_measures": own,
    }
    return Run(folder=folder, matrix=matrix, initial=initial, means=means, progress=progress, others=others, **values)


def check_seed(run: Run, seed: Any) -> None:
    """Refuse a run whose configuration and summary have different seeds.

    Args:
        run: as :func:`read_run` returns it.
        seed: ``seed_everything`` of its configuration.

    Raises:
        RunFolderError: the seeds differ.
    """
    if seed != run.seed:
        said = f"seed_everything = {seed!r}, but summary.json says seed = {run.seed}"
        raise RunFolderError(f"{run.folder / CONFIG}: {said}: they are of different runs")


def _after_tasks(curve: Sequence[float | None], of: Sequence[float | None], tasks: int) -> list[float]:
    """Return a curve's value after the last evaluated round of each task; NaN for a task without one."""
    ends = {int(task): value for value, task in zip(curve, of, strict=False) if None not in (value, task)}  # type: ignore[arg-type]
    return [math.nan if (value := ends.get(task)) is None else value for task in range(tasks)]


def _check_bounds(path: Path, values: Iterable[float | None], measure: Measure) -> None:
    """Refuse values outside the bounds of a measure."""
    low, high = measure.bounds or (-math.inf, math.inf)
    for value in values:
        if value is not None and not low <= value <= high + 1e-6:  # a mean may exceed 100 by rounding
            raise RunFolderError(
                f"{path}: {measure.one} of {value:g} {measure.unit} cannot be; valid: {low:g} to {high:g}"
            )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value, use null")


def _int64(text: str) -> int:
    if len(text) > 18:
        raise ValueError(f"{text:.20}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not abs(value := float(text)) < _LARGEST:
        raise ValueError(f"{text:.20} is too large")
    return value


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return kind == _NUMBER_OR_NULL
    if kind == _TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind == _COUNT else (int, float)):
        return False
    return kind == _NUMBER_OR_NULL or value >= 0
