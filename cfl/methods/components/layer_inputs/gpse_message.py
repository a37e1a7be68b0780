"""Interface of the messages about layer inputs that FOT's clients send: sketches or second moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.spectrum import Spectrum
from cfl.randomness.generators import torch_generator


class LayerOfClient(NamedTuple):
    """A layer in one client's message.

    Attributes:
        name: of the layer.
        number: of the layer among the protected ones.
        d: length of its input vectors, with the 1 of the bias if it counts.
        with_bias: whether a 1 is appended to its inputs.
        positions: input vectors per sample.
        basis: ``[d, k]`` of earlier tasks, or None.
        seed: of the experiment.
        moment: keys random draws: the task, or the round where boundaries are found.
        client: the sender.
        samples: number of the client's samples.
        position: of the client among all senders, ascending.
        clients: number of senders.
    """

    name: str
    number: int
    d: int
    with_bias: bool
    positions: int
    basis: Tensor | None
    seed: int
    moment: int
    client: int
    samples: int
    position: int
    clients: int

    def generator(self, purpose: str) -> torch.Generator:
        """A generator for random draws of this client and this layer alone."""
        return torch_generator(self.seed, purpose, self.moment, self.client, self.number)


class GpseMessage(Protocol):
    """Makes a client's message about a layer's inputs, and reads the sum of these messages at the server."""

    @property
    def needs_bases(self) -> bool:
        """Whether clients compute with the bases of earlier tasks, which are then sent to them."""

    @property
    def without_noise(self) -> str:
        """The parts of a message to which a mechanism adds no noise, in words; empty if there are none."""

    def collector(self, layer: nn.Module, of: LayerOfClient) -> Any:
        """Takes one client's inputs from forward passes, by its ``add(layer, x)``; the layer may be a copy."""

    def sent(self, collector: Any, of: LayerOfClient) -> dict[str, Tensor]:
        """The client's message for the layer, each tensor ``[1, ...]``, from a collector that has seen all inputs."""

    def spectrum(self, sums: Mapping[str, Tensor], name: str, d: int, basis: Tensor | None) -> Spectrum:
        """The principal directions of a layer's inputs, from the sum of the messages."""
