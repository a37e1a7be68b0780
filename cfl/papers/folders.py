"""Where runs lie, and where one that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cfl.papers.definition import Table
from cfl.papers.resolving import Resolver, same_experiment
from cfl.papers.results import read_experiment
from cfl.papers.running import Job
from cfl.reporting.experiment import config_hash
from cfl.runtime.run_files import CHECKPOINT, SUMMARY


def table_folder(table: Table, point: Mapping[str, str]) -> Path:
    """The folder of a point's runs below ``runs/tables``: ``fot/pmnist/iid/fedavg``."""
    return Path(table.paper.name, *(point[axis] for axis in table.paper.run_folder if axis in point))


def run_name(scale: str, experiment: Mapping[str, Any]) -> str:
    """The name of a run's own folder there: ``paper-seed0-1a2b3c4d``."""
    return f"{scale}-seed{experiment['seed_everything']}-{config_hash(experiment)[:8]}"


def job_of(resolver: Resolver, name: str, arguments: Sequence[str], seed: int, above: Path, scale: str) -> Job:
    """A run to be made, or to be continued where it was begun.

    Args:
        resolver: resolves the configuration.
        name: for the user.
        arguments: of ``cfl fit``, without seed and run folder.
        seed: the run's seed.
        above: the folder in which its own one lies.
        scale: with which the name of its own one begins.
    """
    experiment = resolver.experiment(arguments, seed)
    folder = begun(above / run_name(scale, experiment), experiment)
    return Job(name, [*arguments, f"--seed_everything={seed}"], folder, resolver.config(arguments), experiment)


def begun(folder: Path, experiment: Mapping[str, Any]) -> Path:
    """The folder in which a run of an experiment was begun, else the one given.

    A folder's name ends with the hash of all options that there were when the run began; there may be others by now.

    Args:
        folder: where the run would lie: ``<scale>-seed<n>-<hash>``.
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
