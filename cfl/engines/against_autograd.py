"""Compares engines' training steps of a network with plain autograd, on a few samples, before training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.engines.products import Products
from cfl.engines.replica import Replica
from cfl.engines.trial_copies import masks_of_one
from cfl.engines.updates import Update
from cfl.models.batchnorm import batch_mask
from cfl.models.dropout import dropout_masks
from cfl.models.step_draws import StepDraws

SAMPLES = 3
"""Samples of the first of two clients. The second has one less, and is padded where both are computed together."""

MOST_PARAMETERS = 2**24
"""Networks with more parameters should not be compared: it would take nine copies of them, and tens of seconds."""

_ROUNDING = 1e-6
"""Largest difference of a tensor in float64, as a share of its norm."""

_ROUNDING_OTHERWISE = 0.3
"""The same for networks that do not compute in float64; layers with batch statistics reach 0.04 in float32."""

_NOTHING = 1e-3
"""Share of the largest gradient's norm up to which a gradient may be rounding alone."""

_NOTHING_OTHERWISE = 0.1
"""The same for networks that do not compute in float64, such as those in bfloat16."""


class AgainstAutograd:
    """One step of two clients by plain autograd, with which those of engines are compared.

    The loss is a fixed random sum of the outputs, because errors of a network show whatever the loss is.

    Args:
        network: in the mode in which it trains; not changed. It must draw no random numbers other than counted dropout
            and those of :mod:`cfl.models.step_draws`.
        x: ``[3, C, H, W]`` samples, of the parameters' type.

    Raises:
        Exception: whatever the network raises.
    """

    def __init__(self, network: nn.Module, x: Tensor) -> None:
        self._network, self._clients = copy.deepcopy(network), list[_Client]()
        with suppress(Exception):  # the network, or its device, may not compute in float64
            self._clients = _two_clients(_in_float64(self._network), x.double())
        if not self._clients:
            self._network = copy.deepcopy(network)
            self._clients = _two_clients(self._network, x)
        in_float64 = all(parameter.dtype == torch.float64 for parameter in self._network.parameters())
        self._rounding = _ROUNDING if in_float64 else _ROUNDING_OTHERWISE
        self._nothing = _NOTHING if in_float64 else _NOTHING_OTHERWISE

    def under_vmap(self) -> str | None:
        """What differs if ``vmap`` computes both clients together, as a phrase; None if nothing does."""
        network = copy.deepcopy(self._network)
        normalises = any(isinstance(module, _BatchNorm) for module in network.modules())

        def outputs(tensors: dict[str, Tensor], drawn: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
            with dropout_masks(network, drawn), batch_mask(network, mask if normalises else None):
                found: Tensor = functional_call(network, tensors, (x,))
                return found

        weights = {name: weight.requires_grad_() for name, weight in self._stacked(lambda c: c.weights).items()}
        buffers = self._stacked(lambda c: c.buffers)
        given = self._stacked(lambda c: {"x": c.x, "signal": c.signal, "mask": c.mask})
        try:
            drawn = self._stacked(lambda c: c.drawn)
            found = vmap(outputs, randomness="different")({**weights, **buffers}, drawn, given["x"], given["mask"])
            (found * given["signal"]).sum().backward()
        except Exception as error:  # whatever vmap, or a user's forward pass under it, may raise
            return _first_line(error)
        gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        return self._difference(
            [
                ({name: g[row] for name, g in gradients.items()}, {name: b[row] for name, b in buffers.items()})
                for row in range(len(self._clients))
            ]
        )

    def on_a_copy(self) -> str | None:
        """What differs if a copy of the network computes one client after another, as workers do; None if nothing."""
        replica, found = Replica(self._network), []
        has_maps = any(isinstance(module, nn.Conv2d) for module in replica.network.modules())
        for client in self._clients:
            weights = {name: _as_workers_hold(weight, has_maps) for name, weight in client.weights.items()}
            buffers = {name: buffer.clone() for name, buffer in client.buffers.items()}
            gradients = _Gradients()
            try:
                replica.step(client.loss, weights, buffers, client.own_drawn, gradients)
            except Exception as error:  # as above
                return _first_line(error)
            found.append((gradients.found, buffers))
        return self._difference(found)

    def _stacked(self, of: Callable[[_Client], dict[str, Tensor]]) -> dict[str, Tensor]:
        values = [of(client) for client in self._clients]
        return {name: torch.stack([value[name] for value in values]) for name in values[0]}

    def _difference(self, found: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> str | None:
        for client, (gradients, buffers) in zip(self._clients, found, strict=True):
            largest = max((float(g.norm()) for g in client.gradients.values()), default=0.0)
            for name, expected in client.gradients.items():
                off = float((gradients.get(name, torch.zeros_like(expected)) - expected).norm())
                if not off <= self._rounding * max(float(expected.norm()), self._nothing * largest):
                    return f"the gradient of {name} is not that of plain autograd"
            for name, expected in client.buffers_after.items():
                if not torch.allclose(buffers[name], expected, self._rounding, self._rounding, equal_nan=True):
                    return f"the buffer {name} is not that of a plain pass"
        return None


@dataclass(frozen=True)
class _Client:
    """A client before its step, and what plain autograd computes of it.

    Attributes:
        x: ``[SAMPLES, C, H, W]``.
        mask: ``[SAMPLES]`` bool, False where padded.
        signal: ``[SAMPLES, ...]``, gradient of the loss by the outputs; 0 where padded.
        drawn: ``[SAMPLES, ...]`` dropout masks, and what else the network draws.
        own_drawn: the same without padding.
        weights: parameters.
        buffers: buffers before the step.
        gradients: of all parameters that have one.
        buffers_after: buffers after the step.
    """

    x: Tensor
    mask: Tensor
    signal: Tensor
    drawn: dict[str, Tensor]
    own_drawn: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers_after: dict[str, Tensor]

    def loss(self, network: nn.Module) -> Tensor:
        """The loss of the samples that are not padding."""
        return (network(self.x[self.mask]) * self.signal[self.mask]).sum()


def _in_float64(network: nn.Module) -> nn.Module:
    """The network with its tensors in float64. ``network.double()`` would also change what copies share."""
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.double()
    return network


def _two_clients(network: nn.Module, x: Tensor) -> list[_Client]:
    return [_client(network, x, 0, SAMPLES), _client(network, x.flip(0), 1, SAMPLES - 1)]


@torch.enable_grad()
def _client(network: nn.Module, x: Tensor, number: int, samples: int) -> _Client:
    network = copy.deepcopy(network).requires_grad_()
    with torch.no_grad():  # every client has weights of its own
        for parameter in network.parameters():
            parameter.mul_(1 - 0.1 * number)
    masks = masks_of_one(network, x, number)
    draws = {name: values[0] for name, values in StepDraws(network).draw(0, [number], 0, x.device).items()}
    own_drawn = {name: m[:samples] for name, m in masks.items()} | draws
    weights = {name: p.detach() for name, p in network.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with dropout_masks(network, own_drawn):
        outputs = network(x[:samples].clone())  # which a network may change in place
    numbers = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    signal = outputs.new_zeros(SAMPLES, *outputs.shape[1:])
    signal[:samples] = numbers.to(signal)
    (outputs * signal[:samples]).sum().backward()  # not autograd.grad, which some checkpointing refuses
    return _Client(
        x=x,
        mask=torch.arange(SAMPLES, device=x.device) < samples,
        signal=signal,
        drawn=masks | draws,
        own_drawn=own_drawn,
        weights=weights,
        buffers=buffers,
        gradients={name: p.grad for name, p in network.named_parameters() if p.grad is not None},
        buffers_after={name: buffer.clone() for name, buffer in network.named_buffers() if name in buffers},
    )


class _Gradients(Update):
    """Collects a client's gradients."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def product(self, name: str, left: Tensor, right: Tensor, products: Products) -> None:
        self.gradient(name, products.of(left, right))

    def gradient(self, name: str, gradient: Tensor) -> None:
        self.found[name] = gradient


def _as_workers_hold(weight: Tensor, has_maps: bool) -> Tensor:
    """A copy of a weight in the memory layout of :class:`cfl.engines.workers.WorkerEngine`."""
    last = has_maps and weight.ndim == 4
    return weight.clone(memory_format=torch.channels_last if last else torch.preserve_format)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
