"""Pulls towards anchors: the gradients of quadratic penalties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PullSteps = Mapping[str, tuple[Tensor, Tensor]]
"""Parameter name -> anchor, and the share of the way to it that a step moves the weight, see :meth:`Pull.step`."""


@dataclass(frozen=True)
class Pull:
    """The term ``s (w - a)`` that a penalty ``1/2 sum_j s_j (w_j - a_j)^2`` adds to the gradient of every local step.

    Attributes:
        strength: s, at least 0: one number, or ``[k, ...]`` by client and weight; ``[1, ...]`` is the same for all.
        anchor: a, ``[k, ...]`` or ``[1, ...]``, of the weights' type.
    """

    strength: float | Tensor
    anchor: Tensor

    def add_to(self, gradient: Tensor, weight: Tensor) -> None:
        """Add the pull to clients' gradients ``[k, ...]`` at their weights ``[k, ...]``, in place."""
        if isinstance(self.strength, Tensor):
            gradient.addcmul_(self.strength, weight - self.anchor)
        else:
            gradient.add_(weight - self.anchor, alpha=self.strength)

    def step(self, lr: float, weight_decay: float) -> tuple[Tensor, Tensor]:
        """The anchor and t, such that a step of plain SGD is ``w <- (1 - lr wd) (w + t (a - w)) - lr g``.

        That is ``w - lr (g + s (w - a) + wd w)`` with ``t = lr s / (1 - lr wd)``.

        Returns:
            The anchor, ``[k, ...]`` or ``[1, ...]``, and t, ``[]`` or of the strength's shape.
        """
        t = self.strength * (lr / (1 - lr * weight_decay))
        return self.anchor, torch.as_tensor(t, dtype=self.anchor.dtype, device=self.anchor.device)


@torch.no_grad()
def add_pulls(pulls: Mapping[str, Pull], gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Add pulls to clients' gradients (name -> ``[k, ...]``) in place; parameters without gradient are skipped."""
    for name, pull in pulls.items():
        if name in gradients:
            pull.add_to(gradients[name], weights[name])
