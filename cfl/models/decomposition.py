"""Decomposed weights: the sum of a shared base, task-adaptive weights and other clients' adaptive weights.

They are torch parametrizations, so the code of layers does not change and ``weight`` is computed on access::

    weight = base * sigmoid(mask) + adaptive + sum_j attention_j others_j knowledge_j

This is equation 1 of FedWeIT (Yoon et al., 2021), where the sum is over other clients only (``others``). Without the
sum it is additive parameter decomposition (Yoon et al., ICLR 2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cfl.runtime.errors import ConfigError

_BASE = ".parametrizations.weight.original"
_ADDED = ".parametrizations.weight.0."


class Knowledge:
    """Holds a layer's knowledge base so far, ``[at most J, *shape]``, the same for all clients; None if it is empty.

    It is neither a parameter nor a buffer, because every client has its own copy of these. Copies of a network for
    threads share it.
    """

    def __init__(self) -> None:
        self.entries: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Knowledge:
        return self


class DecomposedWeight(nn.Module):
    """Computes one layer's weight from its base; see the module.

    Args:
        weight: ``[O, ...]``, the base.
        masked: whether there is a mask; without one the base is not scaled.
        adaptive: whether there are adaptive weights.
        attends: whether there is attention to a knowledge base; :meth:`reserve` sets its number of entries.
        remembers: whether adaptive weights of earlier tasks are still trained. They are not part of the weight.

    Attributes:
        mask: ``[O]``, a logit per output unit, or None.
        adaptive: ``[O, ...]``, or None; at first a third of the base.
        attention: ``[J]``, a factor per entry that the knowledge base may have, or None.
        others: ``[J]``, 1 for entries that a client may use, else 0; their attention then has gradient 0, too.
        earlier: ``[T, O, ...]``, adaptive weights of earlier tasks, zeros where there are none; or None.
        knowledge: the entries of the knowledge base; while there are none, their sum is 0.
    """

    mask: nn.Parameter | None
    adaptive: nn.Parameter | None
    attention: nn.Parameter | None
    earlier: nn.Parameter | None
    others: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        masked: bool = True,
        adaptive: bool = True,
        attends: bool = False,
        remembers: bool = False,
    ) -> None:
        super().__init__()
        base = weight.detach()
        self.mask = nn.Parameter(base.new_zeros(len(base))) if masked else None
        self.adaptive = nn.Parameter(base / 3) if adaptive else None
        self.attention = nn.Parameter(base.new_zeros(0)) if attends else None
        self.earlier = nn.Parameter(base.new_zeros((0, *base.shape))) if remembers else None
        self.register_buffer("others", base.new_zeros(0) if attends else None)
        self.knowledge = Knowledge()

    def reserve(self, entries: int = 0, earlier: int = 0) -> None:
        """Allocate a knowledge base of ``entries`` entries, and adaptive weights of ``earlier`` earlier tasks.

        These sizes follow from the federation, which is built after the network.
        """
        if self.attention is not None and len(self.attention) != entries:
            self.attention = nn.Parameter(self.attention.new_zeros(entries), self.attention.requires_grad)
            self.others = torch.zeros_like(self.attention.detach())
        if self.earlier is not None and len(self.earlier) != earlier:
            room = self.earlier.new_zeros((earlier, *self.earlier.shape[1:]))
            self.earlier = nn.Parameter(room, self.earlier.requires_grad)

    def forward(self, base: Tensor) -> Tensor:
        """The weight ``[O, ...]``."""
        weight = base if self.mask is None else base * per_unit(torch.sigmoid(self.mask), base)
        if self.adaptive is not None:
            weight = weight + self.adaptive
        entries = self.knowledge.entries
        if self.attention is not None and self.others is not None and entries is not None:
            factors = (self.attention * self.others)[: len(entries)]
            weight = weight + (factors @ entries.flatten(1)).view(base.shape)
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> DecomposedWeight:
        super()._apply(fn, recurse)
        if self.knowledge.entries is not None:
            self.knowledge.entries = fn(self.knowledge.entries)
        return self


class DecomposedLayer:
    """Names of the parts of a layer's weight among a network's parameters and buffers.

    Args:
        name: name of the layer in its network.
        module: the layer.

    Attributes:
        base: name of the base.
        mask: name of the mask.
        adaptive: name of the adaptive weights.
        attention: name of the attention.
        others: name of the buffer that marks usable entries of the knowledge base.
        earlier: name of earlier tasks' adaptive weights.
        bias: name of the bias, if the layer has one.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.base = name + _BASE
        self.mask, self.adaptive, self.attention, self.others, self.earlier = (
            f"{name}{_ADDED}{part}" for part in ("mask", "adaptive", "attention", "others", "earlier")
        )
        self.bias = None if module.bias is None else f"{name}.bias"

    @property
    def parts(self) -> DecomposedWeight:
        """The module that holds the parts."""
        return self.module.parametrizations.weight[0]  # type: ignore[union-attr, index, return-value]

    @property
    def weight(self) -> Tensor:
        """The base ``[O, ...]``."""
        return self.module.parametrizations.weight.original  # type: ignore[union-attr, return-value]


def decompose(
    network: nn.Module,
    masked: bool = True,
    adaptive: bool = True,
    attends: bool = False,
    remembers: bool = False,
) -> None:
    """Decompose the weights of all Linear and Conv2d layers except ``network.head``, in place.

    ``weight`` of layer ``x`` becomes ``x.parametrizations.weight.original``, the base, and its parts
    ``x.parametrizations.weight.0.mask``, ``.adaptive`` and so on. Other parameters keep their names. See
    :class:`DecomposedWeight` for the arguments.

    Raises:
        ValueError: if weights are decomposed already.
        ConfigError: if a layer's weight is made of other tensors, or is that of another layer, too.
    """
    if decomposed_layers(network):
        raise ValueError("the network's weights are decomposed already")
    head = getattr(network, "head", None)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    weights: dict[int, str] = {}
    valid = "layers with a weight of their own"
    for name, layer in layers.items():
        if "weight" not in layer._parameters and layer is not head:
            raise ConfigError("model.network", f"{name}, whose weight is made of others", valid)
        first = weights.setdefault(id(layer.weight), name)
        if first != name:
            raise ConfigError("model.network", f"{first} and {name}, which share a weight", valid)
    for layer in layers.values():
        if layer is head:
            continue
        parts = DecomposedWeight(layer.weight, masked, adaptive, attends, remembers)
        parametrize.register_parametrization(layer, "weight", parts)


def decomposed_layers(network: nn.Module) -> list[DecomposedLayer]:
    """The layers whose weights are decomposed, in the network's order."""
    return [
        DecomposedLayer(name, module)
        for name, module in network.named_modules()
        if parametrize.is_parametrized(module, "weight")
        and isinstance(module.parametrizations.weight[0], DecomposedWeight)
    ]


def is_base(name: str) -> bool:
    """Whether a parameter of this name is the base of a decomposed weight."""
    return name.endswith(_BASE)


def per_unit(values: Tensor, weights: Tensor) -> Tensor:
    """Reshape values ``[..., O]`` of output units to ``[..., O, 1, ...]``, to multiply weights ``[..., O, ...]``.

    Leading axes are those of ``values``.
    """
    return values.view(*values.shape, *[1] * (weights.ndim - values.ndim))
