"""Calls functions of a network with given parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call

_Result = TypeVar("_Result")


class _Function(nn.Module):
    """A function as a module that holds the network."""

    def __init__(self, network: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self._function = network, function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def call_with(
    network: nn.Module, tensors: Mapping[str, Tensor], function: Callable[..., _Result], *inputs: Any
) -> _Result:
    """Return ``function(*inputs)``, during which the network has other parameters and buffers.

    This is ``torch.func.functional_call`` for other functions than the forward pass.

    Args:
        network: the network, in its current mode.
        tensors: parameters and buffers by name; for missing ones the network's own are used.
        function: uses the network, such as one of its methods.
        inputs: of the function.
    """
    named = {f"network.{name}": tensor for name, tensor in tensors.items()}
    result: _Result = functional_call(_Function(network, function), named, inputs)
    return result
