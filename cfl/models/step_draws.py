"""What a network draws anew in every local step, as a pure function of (round, client, step).

As with dropout (:mod:`cfl.models.dropout`), the draw is made outside of the network and lent to it for one forward
pass, so that it depends neither on who is trained beside a client nor on the engine. Unlike a dropout mask it is of the
whole step, not of one sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DrawsEachStep(nn.Module):
    """A module that wants one random tensor per client and local step; within the pass it is :attr:`_drawn`."""

    _drawn: Tensor | None = None

    @property
    def draws(self) -> bool:
        """Whether anything is to be drawn."""
        return True

    @abstractmethod
    def draw(self, round: int, client: int, step: int) -> Tensor:
        """``[n]`` on the CPU, n always the same; the same tensor whenever these three are the same."""


class StepDraws:
    """Draws for all modules of a network that want it.

    Args:
        network: any.
    """

    def __init__(self, network: nn.Module) -> None:
        found = {name: m for name, m in network.named_modules() if isinstance(m, DrawsEachStep)}
        self._modules = {name: module for name, module in found.items() if module.draws}

    def __bool__(self) -> bool:
        return bool(self._modules)

    def draw(self, round: int, clients: Sequence[int], step: int, device: torch.device) -> dict[str, Tensor]:
        """Module name -> ``[k, n]`` of these clients, to be lent by :func:`cfl.models.dropout.dropout_masks`."""
        return {
            name: torch.stack([module.draw(round, client, step) for client in clients]).to(device)
            for name, module in self._modules.items()
        }
