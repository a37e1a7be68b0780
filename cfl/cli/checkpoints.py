"""Checks that the checkpoint of a command line belongs to the experiment that the command line describes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from cfl.callbacks import AccuracyTargets, FederatedOrchestrator, PrivacyBudget
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import Schedule
from cfl.data.sources.kept import remember
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.reporting.experiment import MAY_CHANGE, completed, differences_on_resuming
from cfl.runtime.checkpoint_file import read_checkpoint
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

SECTIONS: Mapping[str, type] = {
    "model": Client,
    "data": FederatedDataModule,
    "schedule": Schedule,
    "buffer": ReplayBuffer,
    "federated": FederatedOrchestrator,
    "targets": AccuracyTargets,
    "privacy": PrivacyBudget,
    "trainer": Trainer,
}
"""The class whose signature has the defaults of a section's options."""


def check_checkpoint(path: Path, experiment: Mapping[str, Any]) -> int:
    """Refuse a file that is no checkpoint, or one of another experiment.

    Args:
        path: the file.
        experiment: the experiment about to run, see :func:`cfl.reporting.experiment.experiment_of`.

    Returns:
        Number of finished rounds of the checkpoint's run.

    Raises:
        ConfigError: the file is refused. The error names the keys that differ.
    """
    if not os.path.isfile(path):
        valid = f"an existing checkpoint file (looked for {path.absolute()}), a run's folder, or last for run.dir's"
        raise ConfigError("ckpt_path", str(path), valid)
    checkpoint = read_checkpoint(path)
    held = checkpoint.get("experiment")
    if not held:
        valid = "a checkpoint that says which configuration it is of, as cfl fit writes it"
        raise ConfigError("ckpt_path", str(path), valid)
    remember(checkpoint.get(FederatedDataModule.__qualname__, {}).get("files", {}))
    # If an option did not exist when the checkpoint was written, the run had its present default.
    found = differences_on_resuming(experiment, completed(held, experiment, SECTIONS))
    if found:
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        allowed = ", ".join(f"{key} ({condition})" if condition else key for key, condition in MAY_CHANGE.items())
        valid = f"a checkpoint of this configuration; they differ in {shown}; what may change is {allowed}"
        raise ConfigError("ckpt_path", str(path), valid)
    return int(checkpoint["federation"]["round"])
