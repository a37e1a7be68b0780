"""Refuses settings of Lightning's Trainer that do not work in a federated run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from cfl.callbacks.progress import RoundProgress
from cfl.data.datamodule import FederatedDataModule
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers, check_numbers
from cfl.training.access import callbacks_of
from cfl.training.step_watchers import is_own
from cfl.training.strategy import check_strategy

NEVER = 10**9  # epochs between validations that no run reaches

SHORT_RUN = "--schedule.rounds_per_task 1 --data.stream.num_tasks 2"
"""Options that make a run short, for an error message."""
_LOGGED = 50
"""Lightning's default for ``log_every_n_steps``."""

_BREAKING: dict[type[Callback], str] = {
    Timer: "no trainer.max_time and no Timer, which stop in the middle of a round; SIGTERM stops a run after a round",
    GradientAccumulationScheduler: "a larger schedule.batch_size instead of accumulated gradients",
    WeightAveraging: "no averaging of weights over local steps: the server averages clients",
    StochasticWeightAveraging: "no averaging of weights over local steps: the server averages clients",
    BaseFinetuning: "no freezing by the Trainer: clients' weights are stacked copies of the network's",
    ModelPruning: "no pruning by the Trainer: clients' weights are stacked copies of the network's",
    BatchSizeFinder: "no search for a batch size: schedule.batch_size says it",
    LearningRateFinder: "no search for a learning rate: cfl sweep compares several",
    EarlyStopping: "targets.accuracies, with targets.stop: true in a run of one task; rounds leave no metric to watch",
    OnExceptionCheckpoint: "checkpoint.enabled: a file written within a round cannot be resumed from",
    ModelCheckpoint: "checkpoint.enabled and its options: a round's end is what a run can be resumed from",
}

Accepted = tuple[tuple[Any, ...], str]
"""The values that a setting of a built Trainer may have, and their description for an error message."""

FIXED_IN_TESTS: dict[str, Accepted] = {
    "barebones": ((False,), "false: it would leave out checkpoints, loggers and evaluations"),
    "enable_autolog_hparams": ((True,), "true: loggers get the configuration of a run"),
    "overfit_batches": ((0.0,), "0.0: max_train of the source instead"),  # it sets the limits
    "limit_val_batches": ((1.0,), "1.0: max_test of the source instead"),
    "limit_test_batches": ((1.0,), "1.0: max_test of the source instead"),
    "limit_predict_batches": ((1.0,), "1.0: no command calls the Trainer's predict"),
}
"""Settings of which one value works in tests and in training."""
FIXED_IN_TRAINING: dict[str, Accepted] = {
    "max_steps": ((-1,), "-1: unset: schedule says how long a run is"),
    "min_epochs": ((None, 0), "0: unset: schedule and targets say how long a run is"),
    "min_steps": ((None, 0), "0: unset: schedule and targets say how long a run is"),
    "accumulate_grad_batches": ((1,), "1: a larger schedule.batch_size instead"),
    "limit_train_batches": ((1.0,), "1.0: a shorter schedule or max_train of the source"),
    "val_check_interval": ((1.0,), "1.0: schedule.evaluate_every instead"),
    "check_val_every_n_epoch": ((1, NEVER), "1; schedule.evaluate_every instead"),  # NEVER if it has trained before
    "reload_dataloaders_every_n_epochs": ((1,), "1: a loader per round"),
}
"""Settings of which one value works in training."""
_AMONG: dict[str, Accepted] = {
    "num_sanity_val_steps": ((0, math.inf), "-1, or 0 to do without FWT"),
    "precision": (("32-true", "bf16-mixed"), "32-true or bf16-mixed"),
}
"""Settings of which several values work in training."""


def check_trainer(trainer: Trainer, data: FederatedDataModule) -> None:
    """Refuse Trainer settings and callbacks with which rounds and epochs would differ, or that would have no effect.

    Raises:
        ConfigError: a setting is refused. The error names it.
    """
    settings: Any = trainer  # some are set by Lightning's connectors, unseen by type checkers
    callbacks: list[Callback] = settings.callbacks
    check_evaluation(trainer)
    check_numbers("trainer", "[0, inf]", or_null=True, gradient_clip_val=trainer.gradient_clip_val)
    check_integers("trainer", 0, log_every_n_steps=settings.log_every_n_steps)
    if settings.gradient_clip_algorithm is not None and settings.gradient_clip_val is None:
        algorithm = str(settings.gradient_clip_algorithm.value)
        raise ConfigError("trainer.gradient_clip_algorithm", algorithm, "null, or trainer.gradient_clip_val beside it")
    if settings.log_every_n_steps != _LOGGED and not any(map(_may_log, callbacks)):
        valid = f"{_LOGGED}, Lightning's default: figures are logged after every round"
        raise ConfigError("trainer.log_every_n_steps", settings.log_every_n_steps, valid)
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ConfigError("trainer.val_check_interval", "a time", "1.0: schedule.evaluate_every instead")
    for callback in callbacks:
        for kind, why in _BREAKING.items():
            if isinstance(callback, kind):
                raise ConfigError("trainer.callbacks", type(callback).__name__, why)
    kinds = [type(callback) for callback in callbacks]
    for kind in kinds:
        if is_own(kind) and kinds.count(kind) > 1:
            valid = "callbacks of others: each of the program's own is there once, with its options in a section"
            raise ConfigError("trainer.callbacks", kind.__name__, valid)
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        valid = "plugins that have written a checkpoint when they return, as it then takes the old one's place"
        raise ConfigError("trainer.plugins", type(trainer.strategy.checkpoint_io).__name__, valid)
    if trainer.max_epochs != data.num_rounds:
        valid = f"{data.num_rounds}: the number of rounds, which follows from schedule"
        raise ConfigError("trainer.max_epochs", trainer.max_epochs, valid)
    _check_values(trainer, {**FIXED_IN_TRAINING, **_AMONG})


def check_anomalies(trainer: Trainer, engine: str) -> None:
    """Refuse ``detect_anomaly`` with an engine that may compute gradients without autograd, which it checks.

    Args:
        trainer: the Trainer, with its settings.
        engine: the value of ``engine.kind``.

    Raises:
        ConfigError: the setting is refused.
    """
    settings: Any = trainer
    if settings._detect_anomaly and engine != "vmap":
        valid = "false, or engine.kind=vmap beside it: other engines compute gradients without autograd"
        raise ConfigError("trainer.detect_anomaly", True, valid)


def check_evaluation(trainer: Trainer) -> None:
    """Refuse Trainer settings that evaluate only parts of the test sets, skip parts of a run or have no effect.

    Raises:
        ConfigError: a setting is refused. The error names it.
    """
    settings: Any = trainer
    if settings.fast_dev_run:  # checked first, because it changes settings that are checked below
        raise ConfigError("trainer.fast_dev_run", settings.fast_dev_run, f"false; a short run has {SHORT_RUN}")
    check_strategy(trainer)
    if settings._accelerator_connector.use_distributed_sampler and trainer.world_size > 1:
        valid = "false: clients and test batches are shared out among processes without samplers"
        raise ConfigError("trainer.use_distributed_sampler", True, valid)
    if settings._model_registry is not None:
        valid = "unset: cfl export writes a run's model for other programs"
        raise ConfigError("trainer.model_registry", settings._model_registry, valid)
    if callbacks_of(trainer, ProgressBar) and any(line.enabled for line in callbacks_of(trainer, RoundProgress)):
        valid = "false, or progress.enabled=false beside it: two lines of progress would write over each other"
        raise ConfigError("trainer.enable_progress_bar", True, valid)
    _check_values(trainer, FIXED_IN_TESTS)


def _may_log(callback: Callback) -> bool:
    """Whether a callback may look at ``log_every_n_steps``: the program's own do not."""
    return not (is_own(type(callback)) or isinstance(callback, ModelSummary | ProgressBar))


def _check_values(trainer: Trainer, accepted: Mapping[str, Accepted]) -> None:
    for key, (values, valid) in accepted.items():
        value = getattr(trainer, key, values[0])
        # An integer 1 is one batch to Lightning, 1.0 all of them.
        if value not in values or (isinstance(values[0], float) and not isinstance(value, float)):
            raise ConfigError(f"trainer.{key}", value, valid)
