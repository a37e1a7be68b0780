"""Where a table's runs lie, and where one that was interrupted goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfl.papers.definition import SCALE, Table
from cfl.papers.resolving import same_experiment
from cfl.papers.results import read_experiment
from cfl.reporting.experiment import config_hash
from cfl.runtime.run_files import CHECKPOINT, SUMMARY


def run_folder(table: Table, point: Mapping[str, str], seed: int, experiment: Mapping[str, Any]) -> Path:
    """Where a run lies below ``runs/tables``: ``fot/pmnist/iid/fedavg/paper-seed0-1a2b3c4d``."""
    axes = [point[axis] for axis in table.paper.run_folder if axis in point]
    name = f"{point[SCALE]}-seed{seed}-{config_hash(experiment)[:8]}"
    return Path(table.paper.name, *axes, name)


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
