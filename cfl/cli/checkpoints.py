"""Checks that the checkpoint of a command line belongs to the experiment that the command line describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, extract_tb
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import checkpoint_connector

from cfl.callbacks import AccuracyTargets, FederatedOrchestrator, PrivacyBudget
from cfl.cli.reasons import reason_for_user
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import Schedule
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.reporting.experiment import MAY_CHANGE, differences_on_resuming, with_defaults
from cfl.runtime.checkpoint_file import read_checkpoint, refusing_what_cfl_does_not_write
from cfl.runtime.errors import ConfigError
from cfl.runtime.run_files import CONFIG
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


def check_checkpoint(
    path: Path, experiment: Mapping[str, Any], configured: bool = True, resumes: bool = True
) -> tuple[int, Mapping[str, Any]]:
    """Read how far a checkpoint's run has got, and what it knows of its data sets' files.

    Args:
        path: the file.
        experiment: the experiment about to run, see :func:`cfl.reporting.experiment.experiment_of`.
        configured: whether the command line has a configuration's file.
        resumes: whether the run is resumed, not scored.

    Returns:
        Number of finished rounds of the checkpoint's run, and its facts for
        :func:`cfl.data.sources.kept.facts_of_run`.

    Raises:
        ConfigError: the file is refused. The error names the keys that differ.
    """
    if not os.path.isfile(path):
        valid = f"an existing checkpoint file (looked for {path.absolute()}), a run's folder, or last for run.dir's"
        raise ConfigError("ckpt_path", str(path), valid)
    checkpoint = read_checkpoint(path)
    with refusing_what_cfl_does_not_write(path):
        files = dict(checkpoint.get(FederatedDataModule.__qualname__, {}).get("files", {}))
        return _rounds_of(checkpoint, path, experiment, configured, resumes), files


def _rounds_of(
    checkpoint: Mapping[str, Any], path: Path, experiment: Mapping[str, Any], configured: bool, resumes: bool
) -> int:
    held = checkpoint.get("experiment")
    if not held:
        valid = "a checkpoint that says which configuration it is of, as cfl fit writes it"
        raise ConfigError("ckpt_path", str(path), valid)
    # If an option did not exist when the checkpoint was written, the run had its present default.
    found = differences_on_resuming(experiment, with_defaults(held, experiment, SECTIONS))
    if found:
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        valid = "a checkpoint of this configuration"
        if not configured and not os.path.exists(path.with_name(CONFIG)):
            valid += f"; there is no {CONFIG} beside it: give that of its run, --config RUN/{CONFIG}"
        valid += f"; they differ in {shown}"
        if resumes:
            allowed = ", ".join(f"{key} ({condition})" if condition else key for key, condition in MAY_CHANGE.items())
            valid += f"; what may change is {allowed}"
        raise ConfigError("ckpt_path", str(path), valid)
    return int(checkpoint["federation"]["round"])


@contextmanager
def naming_what_cannot_be_restored(path: str | None) -> Iterator[None]:
    """Within the context, an error while Lightning restores a checkpoint refuses its file.

    Args:
        path: of the checkpoint; None without one.

    Raises:
        ConfigError: see :func:`cfl.runtime.checkpoint_file.refusing_what_cfl_does_not_write`.
    """
    try:
        yield
    except Exception as error:
        if path is not None and reason_for_user(error) is None and any(map(_restores, extract_tb(error.__traceback__))):
            with refusing_what_cfl_does_not_write(Path(path)):
                raise
        raise


def _restores(frame: FrameSummary) -> bool:
    """Whether a frame is of one of Lightning's functions that restore a checkpoint; others in the file save one."""
    names = ("restore", "_restore", "resume")
    return frame.filename == checkpoint_connector.__file__ and frame.name.startswith(names)
