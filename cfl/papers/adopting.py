"""Copy finished runs that were made elsewhere to the folder of the tables' runs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cfl.papers.cells import each_recipe, table_folder
from cfl.papers.definition import Paper, Table
from cfl.papers.results import read_result
from cfl.reporting.csv_file import RunFolderError
from cfl.running.jobs import run_name
from cfl.running.resolving import Resolver, same_experiment
from cfl.running.run_log import LOG
from cfl.running.runner import LOCK
from cfl.runtime.atomic_write import TEMPORARY, replacing
from cfl.runtime.file_lock import lock
from cfl.runtime.run_files import CHECKPOINT, CHECKSUMS, SUMMARY


def adopt(folder: Path, papers: list[Paper], runs: Path, resolver: Resolver) -> Path:
    """Copy a finished run, without its checkpoint, into the folder of the tables' runs.

    Args:
        folder: the run folder.
        papers: papers whose tables are searched for the run's experiment, at every scale.
        runs: folder of the tables' runs.
        resolver: resolves the tables' configurations.

    Returns:
        The folder of the copy.

    Raises:
        RunFolderError: the folder holds no finished run, its experiment is in no table, or another process works in the
            folder of the copy.
    """
    result = read_result(folder)
    filled = _filled(result.experiment, papers, resolver)
    if filled is None:
        told = "its experiment fills no table; seed apart, every setting must be that of a cell"
        raise RunFolderError(f"{folder}: {told}")
    scale, table, point = filled
    target = runs / table_folder(table, point) / run_name(scale, result.experiment)
    if target.resolve() != folder.resolve():
        target.mkdir(parents=True, exist_ok=True)
        with _alone_in(target):
            _copy(folder, target)
    return target


def _filled(
    experiment: Mapping[str, Any], papers: list[Paper], resolver: Resolver
) -> tuple[str, Table, Mapping[str, str]] | None:
    """The first scale, table and point that an experiment fills; None if it fills none."""
    for paper in papers:
        for scale in paper.scales:
            for table in paper.tables():
                for point, recipe in each_recipe(table, scale):
                    if same_experiment(resolver.experiment(recipe.arguments), experiment):
                        return scale, table, point
    return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which a runner also takes to keep other processes out."""
    with (folder / LOCK).open("w") as held:
        if lock(held.fileno()) is False:
            raise RunFolderError(f"{folder}: another process is at work there")
        yield


def _copy(folder: Path, target: Path) -> None:
    """Copy a run with its summary last, because a folder with a summary counts as a finished run."""
    for name in (SUMMARY, CHECKSUMS):
        (target / name).unlink(missing_ok=True)  # of an earlier run, which is replaced
    leave = shutil.ignore_patterns(CHECKPOINT, TEMPORARY, LOG, ".*lock", SUMMARY)
    shutil.copytree(folder, target, ignore=leave, dirs_exist_ok=True)
    with replacing(target / SUMMARY) as file:
        file.write((folder / SUMMARY).read_bytes())
