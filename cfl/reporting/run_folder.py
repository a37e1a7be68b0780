"""Read the summary, matrix and learning curve of a run from its run folder.

The folder of a finished run holds at least ``summary.json`` (:mod:`cfl.reporting.summary_file`) and the matrix of the
run's measure, such as ``accuracy_matrix.csv`` (:mod:`cfl.reporting.matrix_file`). If there is a learning curve, it also
holds ``rounds.csv`` (:mod:`cfl.reporting.rounds_file`). :mod:`cfl.reporting.compare.reading` reads further files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfl.metrics.base import Better
from cfl.metrics.measure import Measure, measure_named
from cfl.reporting.checksums import check_unchanged
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.measures import CURVES
from cfl.reporting.rounds_file import read_rounds, rounds_to
from cfl.reporting.summary_file import SUMMARY_KEYS, check_bounds, measure_in, read_summary
from cfl.runtime.run_files import CONFIG, ROUNDS, matrix_file

_READ_BESIDE = ("rounds_to_accuracy", "stopped_early", "measures")
"""Entries of a summary, besides :data:`SUMMARY_KEYS`, that are attributes of a :class:`Run`."""


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
        if target in known or not measure_named(self.measure).is_accuracy:
            return known.get(target)
        return rounds_to(self.curve, float(target))


def read_run(folder: Path) -> Run:
    """Read one run.

    Args:
        folder: holds ``summary.json`` and ``accuracy_matrix.csv``, and ``rounds.csv`` where there is a learning curve.

    Raises:
        RunFolderError: the folder or a file is missing, broken, or changed since the run ended, or contradicts another.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: no such folder")
    summary = read_summary(folder)
    measure = measure_in(summary)
    for file in (matrix_file(measure.name), ROUNDS):
        check_unchanged(folder, file)
    path, tasks = folder / matrix_file(measure.name), summary["tasks"]
    matrix, initial = read_matrix_csv(path)
    if len(matrix) != tasks:
        raise RunFolderError(f"{path}: {len(matrix)} tasks, but summary.json says tasks = {tasks}")
    check_bounds(path, matrix[torch.isfinite(matrix)].tolist(), measure)
    columns = _read_progress(folder / ROUNDS, summary, measure)
    curve, of_rounds = columns.get(measure.figure, []), columns.get("task", [])
    values: dict[str, Any] = {key: summary.get(key) for key in (*SUMMARY_KEYS, "used_space")}
    values |= {
        "matrix": matrix,
        "initial": initial,
        "means": _after_tasks(curve, of_rounds, tasks) if "clients_evaluated" in summary else [],
        "begun": 1 + max((int(task) for task in of_rounds if task is not None), default=tasks - 1),
        "rounds_to_accuracy": summary.get("rounds_to_accuracy", {}),
        "stopped_early": summary.get("stopped_early", False),
        "measure": measure.name,
        "own_measures": summary.get("measures", {}),
        "others": {key: value for key, value in summary.items() if key not in {*values, *_READ_BESIDE}},
    }
    # With at most one evaluation per task the curve adds nothing to the accuracy matrix.
    if not values["rounds_to_accuracy"] and sum(value is not None for value in curve) <= tasks:
        curve, columns = [], {}
    progress = {name: column for name, column in columns.items() if name not in (*CURVES.values(), "task")}
    return Run(folder=folder, curve=curve, progress=progress, **values)


def _read_progress(path: Path, summary: Mapping[str, Any], measure: Measure) -> dict[str, list[float | None]]:
    """Read ``rounds.csv`` as :func:`read_rounds`, and refuse what contradicts the summary."""
    columns = read_rounds(path)
    if columns and (rows := len(next(iter(columns.values())))) != summary["rounds"]:
        raise RunFolderError(f"{path}: {rows} rounds, but summary.json says rounds = {summary['rounds']}")
    for task in columns.get("task", []):
        if task is not None and task not in range(summary["tasks"]):
            raise RunFolderError(f"{path}: task {task:g} cannot be; valid: 0 to {summary['tasks'] - 1}")
    check_bounds(path, columns.get(measure.figure, []), measure)
    return columns


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
