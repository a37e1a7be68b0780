"""Networks that are one chain of simple layers: forward, backward and update written out, without autograd.

On small networks, autograd's cost is the writing of gradients that are read only once, to be added to the weights. Here
the product that gives the gradient is added to the weights directly, ``W <- W - lr dZ^T H``, and activations are
changed in place. The arithmetic is that of autograd and ``torch.optim.SGD``, up to float rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.engines.cross_entropy import mean_cross_entropy
from cfl.engines.layers import Conv2d, Dropout, Flatten, Layer, Linear, MaxPool2d, Pass, Relu
from cfl.engines.products import Products
from cfl.engines.right_factors import RightFactor
from cfl.engines.updates import Update
from cfl.models.dropout import CountedDropout, CountedDropout2d

Head = Callable[[Tensor], tuple[Tensor, Tensor]]


class Chain:
    """A network's layers in their order; :meth:`of` finds them.

    Args:
        layers: from input to logits.
        products: multiplies matrices of one client; None is torch's default. Stacks use torch's batched products.
    """

    def __init__(self, layers: Sequence[Layer], products: Products | None = None) -> None:
        self.layers, self.products = tuple(layers), products or Products()
        self.stackable = all(not isinstance(layer, Conv2d | MaxPool2d) for layer in layers)
        self.has_convolutions = any(isinstance(layer, Conv2d) for layer in layers)
        weighted = [layer.weighted for layer in layers]
        # A layer computes the gradient of its input only if a layer before it has weights.
        self._backward = [(layer, any(weighted[:position])) for position, layer in enumerate(layers)][::-1]

    @classmethod
    def of(cls, network: nn.Module, products: Products | None = None) -> Chain | None:
        """A network as a chain, or None if it is not a chain of known layers.

        Known layers are Linear, Conv2d, ReLU, counted Dropout, MaxPool2d and Flatten; ReLU, MaxPool2d and Flatten also
        as functions. They follow one after another, and each weight is used once. The network must have no buffers and
        no hooks, and compute nothing without gradients or in another precision.
        """
        if any(True for _ in network.buffers()) or _has_hooks(network):
            return None
        try:
            # A copy is traced, because a forward pass may change its module.
            with torch.enable_grad():
                graph = _Tracer().trace(copy.deepcopy(network))
        except Exception:  # control flow that depends on data, and whatever else a forward pass may do
            return None
        layers = _layers_of(graph, dict(network.named_modules()))
        if layers is None:
            return None
        weighted = [layer for layer in layers if isinstance(layer, Linear | Conv2d)]
        trained = {n for n, _ in network.named_parameters()}
        used = [n for layer in weighted for n in (layer.weight, layer.bias) if n is not None]
        return cls(layers, products) if set(used) == trained and len(used) == len(trained) else None

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
        weights: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        update: Update,
        head: Head | None = None,
        factors: Mapping[str, RightFactor] | None = None,
    ) -> Tensor:
        """Take one training step: compute the loss, and hand its gradients to ``update`` layer by layer.

        Args:
            x: ``[B, C, H, W]`` of one client or ``[m, B, C, H, W]`` of a stack; may be changed.
            y: ``[B]`` or ``[m, B]`` int64.
            mask: ``[m, B]`` bool, False where padded, or None; stacks only.
            outputs: ``[O]`` bool, the outputs in the loss, or None for all.
            weights: parameter name -> ``[...]`` or ``[m, ...]``.
            masks: dropout layer name -> ``[B, ...]`` or ``[m, B, ...]``.
            update: receives the gradients.
            head: function of the logits that returns a loss and its gradient; None is the mean cross-entropy of ``y``.
            factors: weight name -> factor by which its gradient is multiplied from the right; for one client only.

        Returns:
            The loss, ``[]`` or ``[m]``.
        """
        run = Pass(weights, masks, update, x.ndim - 3, factors, self.products.of_step(int(x.shape[-4])))
        logits = self.forward(run, x)
        loss, g = mean_cross_entropy(logits, y, mask, outputs) if head is None else head(logits)
        self.backward(run, g)
        return loss

    def forward(self, run: Pass, x: Tensor) -> Tensor:
        """Logits ``[..., B, O]`` of inputs, which may be changed; ``run`` keeps what :meth:`backward` needs."""
        h = self.enter(x)
        for layer in self.layers:
            h = layer.forward(run, h)
        return self.turn(h)

    def backward(self, run: Pass, g: Tensor) -> None:
        """Hand the weights' gradients to ``run.update``, last layer first; ``g`` is the gradient by the logits."""
        g = self.turn(g)
        for layer, wanted in self._backward:
            inner = layer.backward(run, g, wanted)
            if not wanted or inner is None:
                break
            g = inner

    def enter(self, x: Tensor) -> Tensor:
        """The images in the memory layout that the layers need."""
        return x.contiguous(memory_format=torch.channels_last) if self.has_convolutions else x

    def turn(self, matrix: Tensor) -> Tensor:
        """Convert the last layer's output to logits ``[..., B, O]``, or their gradient to that of its output."""
        return matrix


def _has_hooks(network: nn.Module) -> bool:
    return any(p._backward_hooks for p in network.parameters()) or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in network.modules()
    )


class _Tracer(fx.Tracer):
    """Refuses forward passes with parts without gradients or in autocast, which a graph does not show."""

    def create_node(self, *arguments: Any, **named: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError("gradients or precision are switched in the forward pass")
        return super().create_node(*arguments, **named)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, CountedDropout | CountedDropout2d) or super().is_leaf_module(m, module_qualified_name)


def _layers_of(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> list[Layer] | None:
    """The layers of a graph that is one chain of known ones; None for any other graph."""
    layers: list[Layer] = []
    before: fx.Node | None = None
    flat = False
    for node in graph.nodes:
        if node.op == "placeholder":
            if before is not None:
                return None
        elif node.op == "output":
            if node.args != (before,):
                return None
        elif list(node.all_input_nodes) != [before]:
            return None
        else:
            layer = _module_layer(node, modules) if node.op == "call_module" else _function_layer(node)
            if layer is None or (isinstance(layer, Linear) and not flat):
                return None  # a linear layer before Flatten would be applied at every place of a map
            if layer:
                flat = flat or isinstance(layer, Flatten)
                layers.append(layer)
        before = node
    return layers


_NOTHING: tuple[()] = ()
"""Stands for a layer that does nothing."""


def _module_layer(node: fx.Node, modules: Mapping[str, nn.Module]) -> Any:
    name = str(node.target)
    module: Any = modules[name]
    kind = type(module)
    if kind is nn.Linear:
        return Linear(name, module)
    if kind is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return Conv2d(name, module)
    if kind is nn.ReLU:
        return Relu()
    if (isinstance(module, _DropoutNd) and not (module.p and module.training)) or kind is nn.Identity:
        return _NOTHING
    if kind in (CountedDropout, CountedDropout2d):
        return Dropout(name)
    if kind is nn.MaxPool2d and not module.return_indices:
        return MaxPool2d(module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    return None


def _function_layer(node: fx.Node) -> Any:
    target, given = node.target, dict(node.kwargs)
    if target in (torch.relu, F.relu, "relu", "relu_") and len(node.args) == 1:
        return Relu() if not given or set(given) == {"inplace"} else None
    if target in (torch.flatten, "flatten"):
        bounds = {**dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)), **given}
        return Flatten() if bounds.get("start_dim", 0) == 1 and bounds.get("end_dim", -1) == -1 else None
    if target in _POOLS:
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        options = {**dict(zip(names, node.args[1:], strict=False)), **given}
        if options.pop("return_indices", False):
            return None
        return MaxPool2d(
            options["kernel_size"],
            options.get("stride"),
            options.get("padding", 0),
            options.get("dilation", 1),
            bool(options.get("ceil_mode", False)),
        )
    return None


_POOLS: tuple[Callable[..., Any], ...] = (F.max_pool2d, vars(F)["_max_pool2d"], torch.max_pool2d)
