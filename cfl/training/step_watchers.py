"""Finds code, other than this program's, that looks at single local steps or their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

_OF_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_STEPS = (*_OF_GRADIENTS, "on_train_batch_start", "on_train_batch_end", "on_before_backward")
_UPDATES = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")


class StepWatchers:
    """A Trainer's gradient clipping, callbacks, and hooks of a subclass of the module, as far as they concern steps.

    Args:
        trainer: the Trainer, with its callbacks.
        module: the module that it trains.
        own: this program's class of modules.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, own: type[LightningModule]) -> None:
        self._trainer: Any = trainer
        self._module, self._own = module, own

    def of_gradients(self) -> bool:
        """Whether clipping, a callback or a subclass of the module reads the gradients of local steps."""
        return bool(self._trainer.gradient_clip_val) or self._there_are(_OF_GRADIENTS, _UPDATES)

    def of_steps(self) -> bool:
        """Whether single steps must go through Lightning's loop.

        That is so with gradient clipping, with mixed precision, and if a foreign callback or a subclass of the module
        has a hook that Lightning calls in every step.
        """
        mixed = self._trainer.precision != "32-true"
        rest = ("training_step", "transfer_batch_to_device")
        return bool(self._trainer.gradient_clip_val) or mixed or self._there_are(_OF_STEPS, (*_UPDATES, *rest))

    def _there_are(self, hooks: tuple[str, ...], of_module: Iterable[str]) -> bool:
        """Whether a foreign callback has one of ``hooks``, or a subclass of the module has one of all these."""
        foreign = [callback for callback in self._trainer.callbacks if not is_own(type(callback))]
        module, kind = self._module, type(self._module)
        return any(is_overridden(hook, callback, Callback) for callback in foreign for hook in hooks) or any(
            hook in vars(module) or getattr(kind, hook) is not getattr(self._own, hook) for hook in (*hooks, *of_module)
        )


def is_own(kind: type[Callback]) -> bool:
    """Whether a class of callbacks is one of this program's."""
    return kind.__module__.startswith("cfl.callbacks.")
