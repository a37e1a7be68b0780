"""Random tensors that a network draws in every local step, as a pure function of (round, client, step).

As with dropout (:mod:`cfl.models.dropout`), a tensor is drawn outside of the network and set for one forward pass, so
that it depends neither on the other clients of the cohort nor on the engine. Unlike a dropout mask it belongs to the
whole step, not to one sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cfl.runtime.moving import moved


class DrawsEachStep(nn.Module):
    """A module that uses one random tensor per client and local step; during the pass it is :attr:`_drawn`."""

    _drawn: Tensor | None = None

    @property
    def draws(self) -> bool:
        """Whether the module draws anything."""
        return True

    @abstractmethod
    def draw(self, round: int, client: int, step: int) -> Tensor:
        """Draw a tensor ``[n]`` on the CPU, n constant; the result depends on these three arguments only."""


class StepDraws:
    """Draws the tensors of all :class:`DrawsEachStep` modules of a network.

    Args:
        network: any network.
    """

    def __init__(self, network: nn.Module) -> None:
        found = {name: m for name, m in network.named_modules() if isinstance(m, DrawsEachStep)}
        self._modules = {name: module for name, module in found.items() if module.draws}

    def __bool__(self) -> bool:
        return bool(self._modules)

    def draw(self, round: int, clients: Sequence[int], step: int, device: torch.device) -> dict[str, Tensor]:
        """Module name -> ``[k, n]`` for these clients, to be set by :func:`cfl.models.dropout.dropout_masks`."""
        return {
            name: moved(torch.stack([module.draw(round, client, step) for client in clients]), device)
            for name, module in self._modules.items()
        }
