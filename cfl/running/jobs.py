"""The runs that are still to be made of the experiments that are wanted, and where they lie."""

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
        name: for the user.
        arguments: of ``cfl fit``, seed included, run folder not.
        folder: the run folder. One that holds an interrupted run is continued.
        config: the resolved configuration.
        experiment: what decides the results.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    config: dict[str, Any]
    experiment: dict[str, Any]

    @property
    def words(self) -> list[str]:
        """The command line without the program's name. It goes on with what is in the folder."""
        return ["fit", *self.arguments, f"--run.dir={self.folder}", "--ckpt_path=last"]

    @property
    def shown(self) -> str:
        """The command as one could type it, with config files as they are called from the project's folder."""
        words = [word.replace(f"--config={CONFIGS}/", "--config=configs/") for word in self.words]
        return shlex.join(["cfl", *words])


class Wanted(NamedTuple):
    """An experiment of which runs are wanted.

    Attributes:
        name: for the user.
        arguments: of ``cfl fit``, without seed and run folder.
        above: the folder in which those of its runs lie.
        prefix: with which the names of these begin.
    """

    name: str
    arguments: Sequence[str]
    above: Path
    prefix: str


@dataclass
class Lacking(Generic[R]):
    """What there is of the wanted runs, and what not.

    Attributes:
        jobs: the runs to be made, seed by seed.
        finished: those that there are.
        diverged: of runs that came to no end as their values left the finite numbers, and would again: name, folder.
    """

    jobs: list[Job]
    finished: list[R]
    diverged: list[tuple[str, Path]]

    @property
    def counted(self) -> str:
        """How many of each there are."""
        more = f", {len(self.diverged)} diverged" if self.diverged else ""
        return f"{len(self.jobs)} run{'' if len(self.jobs) == 1 else 's'} to make, {len(self.finished)} finished{more}"


def lacking(wanted: Iterable[Wanted], seeds: Iterable[int], resolver: Resolver, results: Results[R]) -> Lacking[R]:
    """The runs that are to be made, or to be continued where they were begun.

    Args:
        wanted: the experiments, each once.
        seeds: of each.
        resolver: resolves their configurations.
        results: what is finished, or has diverged.
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
    """The folder in which a run of an experiment was begun, else the one given.

    A folder's name ends with the hash of all options that there were when the run began; there may be others by now.

    Args:
        folder: where the run would lie: ``<prefix>-seed<n>-<hash>``.
        experiment: seed included.
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
