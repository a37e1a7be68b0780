"""Find and read the run folders of a comparison, and report those that are broken or unfinished."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cfl.reporting.checksums import check_unchanged
from cfl.reporting.compare.settings import settings_of
from cfl.reporting.csv_file import RunFolderError, index_in, number_in, open_file, read_csv
from cfl.reporting.experiment import DECIDES_RESULTS
from cfl.reporting.matrix_file import read_matrix_csv
from cfl.reporting.measures import CURVES, matrices_with
from cfl.reporting.names import table_names
from cfl.reporting.rounds_file import read_rounds
from cfl.reporting.run_folder import Run, check_seed, read_run
from cfl.runtime.run_files import CLIENTS, CONFIG, PARTITION, ROUNDS, SAMPLES, SUMMARY, folders_below, matrix_file
from cfl.runtime.yaml_file import BadYAML, read_yaml

T = TypeVar("T")
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Reading:
    """A finished run and the optional parts of its folder.

    Attributes:
        run: its figures and accuracy matrix.
        settings: as :func:`cfl.reporting.compare.settings.settings_of` returns them; empty if the configuration could
            not be read.
        matrices: name of a measure -> the run's matrix ``[T, T]`` of it, NaN where not evaluated.
        space: ``method.layer`` -> task -> percent of the layer's input space that is used up after it.
        clients: each client's mean at the end, such as ACC in percent; empty unless clients are evaluated one by one.
        partition: digest of ``partition.csv``, equal if all clients hold the same samples; empty without the file.
        samples: the run's picture of samples, such as those drawn from a density, as a PNG; empty without one.
    """

    run: Run
    settings: Mapping[str, Any] = field(default_factory=dict)
    matrices: Mapping[str, np.ndarray] = field(default_factory=dict)
    space: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    clients: Sequence[float] = ()
    partition: str = ""
    samples: bytes = b""


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not compared.

    Attributes:
        folder: where it is.
        reason: why it is not compared, in one line.
        unfinished: whether the only reason is that the run has not finished.
    """

    folder: Path
    reason: str
    unfinished: bool = False


def find_runs(paths: Iterable[Path]) -> tuple[list[Path], list[LeftOut]]:
    """Find the run folders among some paths, and below the paths that are not run folders themselves.

    Args:
        paths: run folders, or folders that hold run folders at any depth.

    Returns:
        Run folders, each once, in the order of ``paths``, those below a path by name; and the paths without a run.
    """
    found: dict[Path, Path] = {}
    nothing = []
    for path in paths:
        if not path.is_dir():
            nothing.append(LeftOut(path, "a file, not a folder" if path.exists() else "no such folder"))
            continue
        folders = [path] if is_run(path) else sorted(_below(path))
        if not folders:
            absent = "no summary.json and no config.yaml with rounds.csv or partition.csv"
            nothing.append(LeftOut(path, f"holds no run: there is {absent}"))
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return list(found.values()), nothing


def is_run(path: Path) -> bool:
    """Return whether a folder is a run folder, of a finished run or not."""
    return path.is_dir() and _is_run(set(os.listdir(path)))


def _is_run(names: set[str]) -> bool:
    # partition.csv is written before the first round, rounds.csv after it.
    return SUMMARY in names or (CONFIG in names and not names.isdisjoint((ROUNDS, PARTITION)))


def _below(path: Path) -> Iterable[Path]:
    for folder, inside, files in folders_below(path):
        if _is_run(set(files)):
            inside.clear()
            yield folder


def read_all(folders: Iterable[Path]) -> tuple[list[Reading], list[LeftOut], list[str]]:
    """Read run folders.

    Returns:
        The finished runs, the folders left out, and a line for each part of a run that could not be read.
    """
    readings: list[Reading] = []
    left_out: list[LeftOut] = []
    warnings: list[str] = []
    for folder in folders:
        try:
            if not (folder / SUMMARY).is_file():
                left_out.append(_unfinished(folder))
                continue
            readings.append(read(folder, warnings))
        except (RunFolderError, OSError) as error:
            left_out.append(LeftOut(folder, str(error)))
    return readings, left_out, warnings


def _unfinished(folder: Path) -> LeftOut:
    done = len(next(iter(read_rounds(folder / ROUNDS).values()), []))
    learned = "no task yet"
    for path in [path for name in CURVES if (path := folder / matrix_file(name)).is_file()]:
        matrix = _read_matrix(path)
        diagonal = int(np.isfinite(matrix.diagonal()).sum())
        learned = f"{diagonal} of {len(matrix)} tasks evaluated"
    return LeftOut(folder, f"not finished: {done} rounds done, {learned}", unfinished=True)


def read(folder: Path, warnings: list[str]) -> Reading:
    """Read one finished run.

    Args:
        folder: the run folder.
        warnings: a line is added for each part that is absent or broken while the rest can be compared.

    Raises:
        RunFolderError: there are no figures to compare, or files are of different runs.
    """
    run = read_run(folder)
    _check_agreement(run)

    def part(path: Path, read_part: Callable[[Path], T], consequence: str, optional: bool = False) -> T | None:
        """Read a part of the run; return None if it is absent or broken, with a warning unless it may be absent."""
        try:
            check_unchanged(folder, str(path.relative_to(folder)))
            return None if optional and not path.exists() else read_part(path)
        except (RunFolderError, OSError, BadYAML) as error:
            said = " ".join(str(error).split())
            warnings.append(f"{said if str(path) in said else f'{path}: {said}'}; {consequence}")
            return None

    read_config = partial(_read_config, epsilons=run.others.get("epsilon_all_tasks") is not None)
    config, settings = part(folder / CONFIG, read_config, "its settings are not compared") or ({}, {})
    if config:
        check_seed(run, config["seed_everything"])
    matrices = {run.measure: run.matrix.numpy()}
    for measure in matrices_with(run.own_measures):
        if measure.key != run.measure:
            matrix = part(folder / measure.file, _read_matrix, f"its {measure.name} is not compared", optional=True)
            matrices |= {} if matrix is None else {measure.key: matrix}
    space: dict[str, Mapping[int, float]] = {}
    for name in table_names(config):
        of_method = partial(read_space, tasks=None if run.stopped_early else run.tasks)
        found = part(folder / f"{name}.csv", of_method, "its used space is not compared", optional=True) or {}
        space |= {f"{name}.{layer}": used for layer, used in found.items()}
    of_clients = partial(_client_means, measure=run.measure)
    clients = part(folder / CLIENTS, of_clients, "its clients are not compared") or []
    table = part(folder / PARTITION, _bytes, "its partition is not compared", optional=True) or b""
    partition = hashlib.blake2b(table, digest_size=8).hexdigest() if table else ""
    samples = part(folder / SAMPLES, _bytes, "its samples are not shown", optional=True) or b""
    return Reading(run, settings, matrices, space, clients, partition, samples)


def _read_config(path: Path, epsilons: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read a run's configuration, and compute its :func:`settings_of`."""
    try:
        config = read_yaml(path)
    except FileNotFoundError:
        raise RunFolderError(f"{path}: no such file") from None
    if not isinstance(config, Mapping):
        raise RunFolderError(f"{path}: holds no configuration")
    if lacking := [key for key in DECIDES_RESULTS if key not in config]:
        raise RunFolderError(f"{path}: lacks {', '.join(lacking)}")
    try:
        return config, settings_of(config, epsilons)
    except (TypeError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{path}: not the configuration of a run ({error})") from None


def _check_agreement(run: Run) -> None:
    """Refuse a run whose summary and tables disagree: one of them is damaged or of another run."""
    if run.stopped_early:  # possibly within a task, whose row is then incomplete
        return
    name = CURVES[run.measure]
    figure = {"acc": run.acc, **run.others}.get(name)
    told: dict[str, float | None] = {}
    if "clients_evaluated" not in run.others:
        told[matrix_file(run.measure)] = run.matrix[-1].mean().item()
    told[ROUNDS] = next((value for value in reversed(run.curve) if value is not None), None)
    for file, value in told.items():
        if value is not None and figure is not None and not abs(value - figure) < _ROUNDING:
            said = f"{name} = {value:g} at the end, but summary.json says {name} = {figure:g}"
            raise RunFolderError(f"{run.folder / file}: {said}: one of them is damaged or of another run")


def _read_matrix(path: Path) -> np.ndarray:
    return read_matrix_csv(path)[0].numpy()


def _bytes(path: Path) -> bytes:
    open_file(path).close()  # refuses a path that is not a file
    return path.read_bytes()


def read_space(path: Path, tasks: int | None) -> dict[str, dict[int, float]]:
    """Read the used space from a method's table.

    Args:
        path: a table with the columns ``task``, ``layer`` and ``used_space`` in percent; other columns are not read.
        tasks: number of the run's tasks. The table has rows for all but the last task, or for all (FOT's
            ``last_extraction``). None for a run that stopped early: the table then may have rows for fewer.

    Returns:
        Layer -> task -> percent; empty where the table lacks one of the columns.

    Raises:
        RunFolderError: an invalid value, or a missing task; the message names the file and the line.
    """
    found: dict[str, dict[int, float]] = {}
    header, lines = read_csv(path)
    if not {"task", "round"} & set(header):
        raise RunFolderError(f"{path}: the first line names neither task nor round")
    if {"task", "layer", "used_space"} <= set(header):
        for line, row in lines:
            cells = dict(zip(header, row, strict=True))
            task = index_in(cells["task"], "task", path, line)
            if cells["used_space"]:
                used, of_layer = number_in(cells["used_space"], path, line), found.setdefault(cells["layer"], {})
                if task != len(of_layer) or not 0 <= used <= 100 + _ROUNDING:
                    said = f"{used:g} % of task {task} cannot be; valid: 0 to 100, of task {len(of_layer)}"
                    raise RunFolderError(f"{path}, line {line}: {said}")
                of_layer[task] = used
    for layer, of_layer in found.items():
        if tasks is not None and len(of_layer) not in (tasks - 1, tasks):
            raise RunFolderError(f"{path}, line {lines[-1][0]}: {layer} has {len(of_layer)} rows, of {tasks - 1} tasks")
    return found


def _client_means(folder: Path, measure: str) -> list[float]:
    """Return each client's mean over the tasks seen, in the last evaluated row of its matrix file, if there is one."""
    means = []
    for path in sorted(folder.glob(f"{measure}_matrix_*.csv")):
        matrix = _read_matrix(path)
        rows = np.flatnonzero(np.isfinite(matrix).any(axis=1))
        seen = matrix[rows[-1], : rows[-1] + 1] if len(rows) else np.empty(0)
        means += [float(np.nanmean(seen))] if np.isfinite(seen).any() else []
    return means
