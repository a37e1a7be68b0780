"""Finds which runs of some experiments are still to be made, and their run folders."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple

from cfl.cli.installed_configs import CONFIGS
from cfl.reporting.experiment import config_hash
from cfl.running.finished import R, Results, read_experiment
from cfl.running.resolving import Resolver, same_experiment
from cfl.runtime.run_files import CHECKPOINT, SUMMARY


@dataclass(frozen=True)
class Job:
    """One run to be made.

    Attributes:
        name: name of the run, for the user.
        arguments: arguments of ``cfl fit``, with the seed and without the run folder.
        folder: the run folder. An interrupted run in it is continued.
        config: the resolved configuration.
        experiment: the settings that decide the results.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    config: dict[str, Any]
    experiment: dict[str, Any]

    @property
    def words(self) -> list[str]:
        """The command line without the program's name. It continues a run that is in the folder."""
        return ["fit", *self.arguments, f"--run.dir={self.folder}", "--ckpt_path=last"]

    @property
    def shown(self) -> str:
        """The command, quoted for a shell, with installed configurations by their short paths."""
        words = [word.replace(f"--config={CONFIGS}/", "--config=configs/") for word in self.words]
        return shlex.join(["cfl", *words])


class Wanted(NamedTuple):
    """An experiment of which runs are wanted.

    Attributes:
        name: name of the experiment, for the user.
        arguments: arguments of ``cfl fit``, without seed and run folder.
        above: the folder in which the run folders are.
        prefix: the beginning of the run folders' names.
    """

    name: str
    arguments: Sequence[str]
    above: Path
    prefix: str


@dataclass
class Lacking(Generic[R]):
    """The wanted runs, divided into those that are to be made, finished, and diverged.

    Attributes:
        jobs: the runs to be made, seed by seed.
        finished: the finished runs.
        diverged: (name, folder) of runs that were ended by NaN or infinity. They are not made again.
    """

    jobs: list[Job]
    finished: list[R]
    diverged: list[tuple[str, Path]]

    @property
    def counted(self) -> str:
        """The number of runs of each kind, in words."""
        more = f", {len(self.diverged)} diverged" if self.diverged else ""
        return f"{len(self.jobs)} run{'' if len(self.jobs) == 1 else 's'} to make, {len(self.finished)} finished{more}"


def lacking(wanted: Iterable[Wanted], seeds: Iterable[int], resolver: Resolver, results: Results[R]) -> Lacking[R]:
    """Find the runs that are to be made or continued.

    Args:
        wanted: the experiments, each once.
        seeds: the seeds of each experiment.
        resolver: resolves their configurations.
        results: finished and diverged runs.
    """
    found: Lacking[R] = Lacking([], [], [])
    known = []
    for one in wanted:
        experiment = resolver.experiment(one.arguments)
        known.append((one, results.of(experiment), results.diverged_seeds(experiment)))
    for seed in seeds:
        for one, finished, diverged in known:
            name = f"{one.name} seed {seed}"
            if seed in finished:
                found.finished.append(finished[seed])
            elif seed in diverged:
                found.diverged.append((name, diverged[seed]))
            else:
                experiment = resolver.experiment(one.arguments, seed)
                folder = begun(one.above / run_name(one.prefix, experiment), experiment)
                arguments = [*one.arguments, f"--seed_everything={seed}"]
                found.jobs.append(Job(name, arguments, folder, resolver.config(one.arguments), experiment))
    return found


def run_name(prefix: str, experiment: Mapping[str, Any]) -> str:
    """The name of a run's own folder: ``paper-seed0-1a2b3c4d``."""
    return f"{prefix}-seed{experiment['seed_everything']}-{config_hash(experiment)[:8]}"


def begun(folder: Path, experiment: Mapping[str, Any]) -> Path:
    """The folder in which a run of an experiment was begun, or otherwise ``folder``.

    A folder's name ends with the hash of all options that existed when the run began. If options have been added since,
    the hash of the same experiment differs.

    Args:
        folder: the run folder by present options: ``<prefix>-seed<n>-<hash>``.
        experiment: the experiment, with its seed.
    """
    if (folder / CHECKPOINT).exists() or (folder / SUMMARY).exists():
        return folder
    name = folder.name.rpartition("-")[0]
    for other in sorted(folder.parent.glob(f"{name}-*")):
        if (other / CHECKPOINT).exists() and not (other / SUMMARY).exists():
            found = read_experiment(other)
            same_seed = found is not None and found["seed_everything"] == experiment["seed_everything"]
            if found is not None and same_seed and same_experiment(experiment, found):
                return other
    return folder
