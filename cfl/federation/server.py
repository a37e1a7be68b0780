"""The server: the global model and its update rule. It works on tensors and uses neither Lightning nor data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

StepTransform = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""A method's change of the server's step (name -> tensor, to be added to the parameters), e.g. FOT's projection."""


class Server:
    """Updates the global model by server-side SGD with momentum on the clients' mean update.

    With mean update ``d`` (trained - received), momentum ``m`` and learning rate ``lr``:
    ``v <- m v + d``, ``step = lr v``, every transform in turn, ``w <- w + step``. The transforms come last, so a
    projection also applies to the stored momentum. ``lr = 1, m = 0`` is federated averaging.

    Args:
        parameters: name -> tensor, changed in place.
        buffers: name -> tensor (BatchNorm statistics), changed in place.
        lr: server learning rate.
        momentum: server momentum in [0, 1).
    """

    def __init__(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], lr: float = 1.0, momentum: float = 0.0
    ) -> None:
        self.parameters, self.buffers = parameters, buffers
        self.lr, self.momentum = lr, momentum
        self.velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(
        self,
        mean_update: dict[str, Tensor],
        mean_buffers: dict[str, Tensor],
        transforms: Iterable[StepTransform] = (),
    ) -> None:
        """Update the global model after a round.

        Args:
            mean_update: parameter name -> weighted mean of the clients' updates.
            mean_buffers: buffer name -> weighted mean of the clients' buffers (integer buffers are rounded).
            transforms: the methods' server-side transforms, in order.
        """
        step = {}
        for name, update in mean_update.items():
            if self.momentum:
                # To the update's device: a checkpoint is loaded before the network moves to an accelerator.
                velocity = self.velocity.get(name, torch.zeros_like(update)).to(update.device)
                update = self.velocity[name] = velocity.mul_(self.momentum).add_(update)
            step[name] = update * self.lr  # new memory: a transform may work in place, and the velocity must not change
        for transform in transforms:
            step = transform(step)
        for name, change in step.items():
            self.parameters[name].add_(change)
        for name, mean in mean_buffers.items():
            target = self.buffers[name]
            target.copy_(mean if target.is_floating_point() else mean.round())

    def state_dict(self) -> dict[str, Any]:
        """The velocity of server momentum. The model itself is in the network's state dict."""
        return {"velocity": {name: v.clone() for name, v in self.velocity.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.velocity = {name: v.to(self.parameters[name].device) for name, v in state["velocity"].items()}
