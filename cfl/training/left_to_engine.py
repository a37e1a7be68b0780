"""What an engine may do of a local step in the place of the optimizer and of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from cfl.engines.base import Engine
from cfl.engines.updates import plain_sgd
from cfl.methods.composition import Composition, Factors, Pulls

_LOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_STEPS = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")


def gradients_are_watched(trainer: Trainer, module: LightningModule, own: type[LightningModule]) -> bool:
    """Whether clipping, a callback or a subclass of the module wants to see the gradients of local steps.

    Args:
        trainer: with its callbacks.
        module: what it trains.
        own: the program's own class of it.
    """
    settings: Any = trainer
    return (
        bool(settings.gradient_clip_val)
        or any(is_overridden(hook, callback) for callback in settings.callbacks for hook in _LOOKS)
        or any(replaces(module, hook, own) for hook in (*_LOOKS, *_STEPS))
    )


def replaces(module: LightningModule, hook: str, own: type[LightningModule]) -> bool:
    """Whether a module has another hook than the program's own class."""
    return hook in vars(module) or getattr(type(module), hook) is not getattr(own, hook)


def step_at_once(
    optimizer: Optimizer, methods: Composition, engine: Engine | None, watched: Callable[[], bool]
) -> tuple[float, float] | None:
    """Learning rate and weight decay, if an engine may take the optimizer's step without leaving gradients.

    That is so for plain SGD whose weight decay leaves something of the weights, unless a method or somebody else wants
    to see the gradients.

    Args:
        optimizer: the clients'.
        methods: the methods of the run.
        engine: what computes the steps; None while one is being chosen.
        watched: whether somebody else wants to see gradients.
    """
    pulls, factors = left_to_engine(methods, engine)
    if (methods.changing_gradients() and not (pulls or factors)) or watched():
        return None
    plain = plain_sgd(optimizer)
    return None if plain is not None and plain[0] * plain[1] >= 1 else plain


def left_to_engine(methods: Composition, engine: Engine | None) -> tuple[Pulls, Factors]:
    """What an engine does itself of a method, see :meth:`cfl.methods.composition.Composition.left_to_engine`; nothing
    while one is being chosen."""
    return methods.left_to_engine(engine is not None and engine.multiplies, engine is not None and engine.pulls)
