"""How many local steps are taken in one go, without Lightning's loop in between."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from cfl.training.left_to_engine import replaces

BLOCK_SECONDS = 1.0
"""Approximate duration of a block of local steps. Progress and signals are handled between blocks."""

_OF_A_STEP = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
_OF_A_MODULE = (
    *_OF_A_STEP,
    "training_step",
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)


def steps_are_watched(trainer: Trainer, module: LightningModule, own: type[LightningModule]) -> bool:
    """Whether single local steps must go through Lightning's loop.

    That is so with gradient clipping, with mixed precision, and if a foreign callback or a subclass of the module has a
    hook that Lightning calls in every step.

    Args:
        trainer: the Trainer, with its callbacks.
        module: the module that it trains.
        own: this program's class of modules.
    """
    settings: Any = trainer
    return (
        bool(settings.gradient_clip_val)
        or trainer.precision != "32-true"
        or any(
            is_overridden(hook, c, Callback) for c in settings.callbacks if not is_own(type(c)) for hook in _OF_A_STEP
        )
        or any(replaces(module, hook, own) for hook in _OF_A_MODULE)
    )


def is_own(kind: type[Callback]) -> bool:
    """Whether a class of callbacks is one of this program's."""
    return kind.__module__.startswith("cfl.callbacks.")


def steps_per_block(seconds_per_step: float) -> int:
    """Number of local steps that take about :data:`BLOCK_SECONDS`, at least 1.

    Args:
        seconds_per_step: duration of a step of a whole cohort.
    """
    return max(1, int(BLOCK_SECONDS / max(seconds_per_step, 1e-6)))
