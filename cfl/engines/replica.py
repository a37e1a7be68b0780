"""Local steps by autograd, one client after another on one copy of the network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cfl.engines.updates import Update
from cfl.models.dropout import dropout_masks


class Replica:
    """A copy of the network that one thread uses for one client after another.

    Args:
        network: the architecture, in the mode that it trains in. Modules in evaluation mode stay in it.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = copy.deepcopy(network)
        # A tensor that is used in several places has one name.
        names = {id(t): n for n, t in (*self.network.named_parameters(), *self.network.named_buffers())}
        places = [
            (held, local)
            for module in self.network.modules()
            for held in (module._parameters, module._buffers)
            for local in held
        ]
        self._slots = [(names[id(held[local])], held, local) for held, local in places if held[local] is not None]
        self.unused: set[str] = set()
        self.used: set[str] = set()

    def step(
        self,
        loss_of: Callable[[nn.Module], Tensor],
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dropped: dict[str, Tensor],
        update: Update,
    ) -> Tensor:
        """Take one client's step by autograd, as :meth:`Chain.step`; return the loss. Buffers are changed in place."""
        # All clients' weights are views of one tensor. `.data`, unlike `.detach()`, has a version counter of its own:
        # otherwise autograd would mistake another thread's update for a change of this client's weights.
        leaves = {name: weight.data.requires_grad_() for name, weight in weights.items()}
        tensors = {**leaves, **{name: buffer.data for name, buffer in buffers.items()}}
        for name, held, local in self._slots:
            held[local] = tensors[name]  # type: ignore[assignment]
        masks: AbstractContextManager[Any] = dropout_masks(self.network, dropped) if dropped else nullcontext()
        with masks:
            loss = loss_of(self.network)
        loss.backward()
        with torch.no_grad():
            for name, leaf in leaves.items():
                if leaf.grad is None:
                    self.unused.add(name)
                else:
                    self.used.add(name)
                    update.gradient(name, leaf.grad)
        return loss.detach()
