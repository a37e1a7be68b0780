"""Finished runs below a folder, and which of them belong to an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from cfl.reporting.checksums import check_unchanged
from cfl.reporting.csv_file import RunFolderError
from cfl.reporting.experiment import experiment_of, setting_hash
from cfl.reporting.run_folder import Run, check_seed, read_run
from cfl.reporting.summary_file import read_summary
from cfl.running.resolving import same_experiment
from cfl.running.run_log import LOG, has_diverged
from cfl.runtime.run_files import CONFIG, SUMMARY, folders_below
from cfl.runtime.yaml_file import BadYAML, read_yaml


@dataclass(frozen=True, eq=False)
class Finished:
    """One finished run.

    Attributes:
        experiment: the settings that decide the run's results (:func:`cfl.reporting.experiment.experiment_of`).
        folder: the run folder; of a run that the project keeps, its file.
    """

    experiment: Mapping[str, Any]
    folder: Path

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.experiment["seed_everything"])


R = TypeVar("R", bound=Finished)


def read_finished(folder: Path) -> Finished:
    """Read a finished run's folder.

    Raises:
        RunFolderError: as for :func:`run_and_experiment`.
    """
    return Finished(run_and_experiment(folder)[1], folder)


def run_and_experiment(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The figures of a finished run, and its experiment.

    Raises:
        RunFolderError: the folder holds no finished run, or a file of the run is missing or damaged.
    """
    run = read_run(folder)
    check_unchanged(folder, CONFIG)
    experiment = read_experiment(folder)
    if experiment is None:
        raise RunFolderError(f"{folder / CONFIG}: not what a finished run leaves")
    check_seed(run, experiment["seed_everything"])
    return run, experiment


def read_experiment(folder: Path) -> dict[str, Any] | None:
    """The experiment of a run, finished or not; None if its configuration cannot be read."""
    try:
        config = read_yaml(folder / CONFIG)
        int(config["seed_everything"])
        return experiment_of(config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, BadYAML):
        return None


def not_recorded(config: Mapping[str, Any], folder: Path) -> list[str]:
    """The options of a configuration that only say what is recorded, and that a finished run was made without.

    These are no part of an experiment. A run that records more lacks nothing.

    Args:
        config: a resolved configuration.
        folder: a finished run of its experiment.
    """
    made = read_yaml(folder / CONFIG)

    def both(section: str) -> tuple[dict[str, Any], dict[str, Any]]:
        wanted, found = (json.loads(json.dumps(one.get(section) or {})) for one in (config, made))
        return wanted, found

    wanted, found = both("measures")
    lacking = [f"measures.{name}" for name, measure in wanted.items() if found.get(name) != measure]
    wanted, found = both("targets")
    if not set(wanted.get("accuracies") or []) <= set(found.get("accuracies") or []):
        lacking.append("targets.accuracies")
    wanted, found = both("privacy")
    if read_summary(folder).get("epsilon_all_tasks") is not None:
        lacking += [f"privacy.{key}" for key in sorted(wanted) if found.get(key) != wanted[key]]
    wanted, found = both("local_models")
    if wanted.get("evaluate") and not found.get("evaluate"):
        lacking.append("local_models.evaluate")
    return lacking


def diverged_experiment(folder: Path) -> dict[str, Any] | None:
    """The experiment of a run that was ended by NaN or infinity; None for any other run."""
    return read_experiment(folder) if has_diverged(folder) else None


class Results(Generic[R]):
    """Finished runs, which can be searched for those of an experiment.

    Args:
        results: the finished runs. If two have the same experiment and seed, the first one is used.
        left_out: reasons why folders could not be read, a line for each folder.
        diverged: folder -> experiment of each run that was ended by NaN or infinity.
    """

    def __init__(
        self,
        results: Iterable[R],
        left_out: Sequence[str] = (),
        diverged: Mapping[Path, Mapping[str, Any]] | None = None,
    ) -> None:
        self.all, self.left_out, self.diverged = list(results), list(left_out), dict(diverged or {})
        self._by_hash: dict[str, list[R]] = {}
        for result in self.all:
            self._by_hash.setdefault(setting_hash(result.experiment), []).append(result)

    def of(self, experiment: Mapping[str, Any]) -> dict[int, R]:
        """Seed -> run, for all seeds of an experiment; seeds ascend."""
        found: dict[int, R] = {}
        for result in self._by_hash.get(setting_hash(experiment), []):
            found.setdefault(result.seed, result)
        for group in self._by_hash.values():
            if same_experiment(experiment, group[0].experiment):
                for result in group:
                    found.setdefault(result.seed, result)
        return dict(sorted(found.items()))

    def diverged_seeds(self, experiment: Mapping[str, Any]) -> dict[int, Path]:
        """Seed -> run folder, for seeds whose run was ended by NaN or infinity and of which no run is finished."""
        seeds = {
            int(found["seed_everything"]): folder
            for folder, found in self.diverged.items()
            if same_experiment(experiment, found)
        }
        finished = self.of(experiment) if seeds else {}
        return {seed: folder for seed, folder in seeds.items() if seed not in finished}


def read_results(root: Path, read: Callable[[Path], R]) -> Results[R]:
    """Read all finished runs below a folder. Folders that cannot be read are left out, with the reason.

    Args:
        root: the folder.
        read: reads a run folder; raises a :class:`RunFolderError` if it cannot.
    """
    found, left_out = [], []
    diverged: dict[Path, Mapping[str, Any]] = {}
    for folder, _, names in folders_below(root):
        if SUMMARY in names:
            try:
                found.append(read(folder))
            except RunFolderError as error:
                left_out.append(str(error))
        if LOG in names and (experiment := diverged_experiment(folder)):
            diverged[folder] = experiment
    return Results(found, left_out, diverged)
