"""Sums over samples of squared per-sample gradients, without one backward pass per sample.

The gradients are those of ``v_b . logits_b`` of every sample b, for given signals ``v [B, O]``. Autograd runs once for
the batch, down to the layers' outputs. The gradients of a layer's weights follow from its inputs and its outputs'
gradients (:mod:`cfl.methods.components.curvature.layer_squares`). This works for a layer that is called once and does
not share its weights. All other parameters are differentiated sample by sample under ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from cfl.methods.components.curvature.layer_squares import (
    chunks,
    convolution_squares,
    linear_squares,
    normalisation_squares,
)
from cfl.models.batchnorm import MaskedBatchNorm1d, MaskedBatchNorm2d
from cfl.models.evaluation import evaluation_mode
from cfl.models.made import MaskedLinear

Signals = Callable[[Tensor], Iterable[Tensor]]


def squared_gradient_sums(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    signals: Signals,
    names: Sequence[str],
    batch_statistics: bool = False,
) -> dict[str, Tensor]:
    """``sum_v sum_b (d (v_b . logits_b) / d w)^2`` for every parameter w, the network in evaluation mode.

    Args:
        network: ``[B, ...]`` to logits ``[B, O]``, each row from its own sample alone.
        tensors: parameters and buffers to compute with, by name; missing ones are taken from the network.
        x: ``[B, ...]`` inputs.
        signals: function from logits ``[B, O]`` to one or more v, each ``[B, O]``; logits and v carry no gradient.
        names: the parameters w.
        batch_statistics: BatchNorm layers that are in training mode normalise by the batch's own statistics instead of
            their running ones, taken as constants. Layers without running statistics always do.

    Returns:
        name -> sum, shaped as the parameter.
    """
    given = {**dict(network.named_parameters()), **dict(network.named_buffers()), **tensors}
    given = {name: tensor.detach() for name, tensor in given.items()}
    with _constant_statistics(network, batch_statistics), evaluation_mode(network):
        with torch.enable_grad(), _Recording(network, given, names) as recording:
            logits = functional_call(network, given, (x,))
        seen = recording.layers()
        sums = {name: torch.zeros_like(given[name], memory_format=torch.contiguous_format) for name in names}
        direct = {name for layer in seen for name in layer.parameters}
        others = [name for name in names if name not in direct]
        for v in signals(logits.detach()):
            for layer, d in zip(seen, _output_gradients(logits, seen, v), strict=True):
                if d is not None:
                    layer.add_squares(d, sums)
            if others:
                _add_sample_by_sample(network, given, x, v, others, sums)
    return sums


def _output_gradients(logits: Tensor, layers: Sequence[_Seen], v: Tensor) -> Sequence[Tensor | None]:
    if not logits.requires_grad or not layers:
        return [None] * len(layers)
    outputs = [layer.output for layer in layers]
    return torch.autograd.grad(logits, outputs, v, retain_graph=True, allow_unused=True)


# Inputs and outputs of layers in the forward pass.


@dataclass
class _Seen:
    """One layer's call: its input and output, and further values that the gradients of its weights need."""

    module: nn.Module
    weight: str | None
    bias: str | None
    input: Tensor
    output: Tensor
    statistics: tuple[Tensor, Tensor] | None
    mask: Tensor | None

    @property
    def parameters(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]

    def add_squares(self, d: Tensor, sums: dict[str, Tensor]) -> None:
        """Add the squared gradients of all samples, given the outputs' gradients ``d``."""
        a, d = self.input.detach(), d.detach()
        if isinstance(self.module, nn.Linear):
            of_weight, of_bias = linear_squares(a, d, self.weight is not None)
            if of_weight is not None and self.mask is not None:
                of_weight = of_weight * self.mask
        elif isinstance(self.module, nn.Conv2d):
            of_weight, of_bias = convolution_squares(self.module, a, d, self.weight is not None)
        else:
            assert self.statistics is not None
            of_weight, of_bias = normalisation_squares(a, d, *self.statistics)
        if self.weight is not None and of_weight is not None:
            sums[self.weight] += of_weight.view(sums[self.weight].shape)
        if self.bias is not None:
            sums[self.bias] += of_bias


# Attributes and methods of tensors that do not read their values.
_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_contiguous")),
}


class _Recording(TorchFunctionMode):
    """Within the context, records the layers' inputs and outputs, and other uses of their weights.

    Args:
        network: the network that will be called.
        tensors: name -> the tensor objects it is called with.
        names: the parameters whose squared gradients are needed.
    """

    def __init__(self, network: nn.Module, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self._modules = {name: module for name, module in network.named_modules() if _is_known(module)}
        wanted = set(names)
        self._parameters = {
            layer: [f"{layer}.{own}" if layer else own for own, _ in module.named_parameters(recurse=False)]
            for layer, module in self._modules.items()
        }
        self._parameters = {layer: [n for n in own if n in wanted] for layer, own in self._parameters.items()}
        self._owner = {id(tensors[name]): layer for layer, own in self._parameters.items() for name in own}
        self._inside: str | None = None
        self._seen: dict[str, _Seen] = {}
        self._elsewhere: set[str] = set()
        self._hooks = ExitStack()

    def __enter__(self) -> _Recording:
        for name, module in self._modules.items():
            if self._parameters[name]:
                for handle in self._watch(name, module):
                    self._hooks.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def layers(self) -> list[_Seen]:
        """The layers whose parameters' gradients follow from their inputs and outputs."""
        return [seen for name, seen in self._seen.items() if name not in self._elsewhere]

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._inside = name

        def after(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self._inside = None
            if name in self._seen:
                self._elsewhere.add(name)
            own = {n.rpartition(".")[2]: n for n in self._parameters[name]}
            statistics = None
            if isinstance(module, _BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                statistics = (module.running_mean, (module.running_var + module.eps).sqrt())
            if not output.requires_grad:
                output = output.detach().requires_grad_()
            mask = inputs[1] if isinstance(module, MaskedLinear) else None
            self._seen[name] = _Seen(module, own.get("weight"), own.get("bias"), inputs[0], output, statistics, mask)
            return output.clone()  # later operations may change it in place

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        for argument in (*args, *kwargs.values()):
            for part in argument if isinstance(argument, list | tuple) else (argument,):
                owner = self._owner.get(id(part)) if isinstance(part, Tensor) else None
                if owner is not None and owner != self._inside:
                    self._elsewhere.add(owner)
        return func(*args, **kwargs)


def _is_known(module: nn.Module) -> bool:
    """Whether the layer's gradients are known in closed form; not for subclasses, which may compute anything."""
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return type(module) in (
        nn.Linear,
        MaskedLinear,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        MaskedBatchNorm1d,
        MaskedBatchNorm2d,
    )


# All other parameters.


def _add_sample_by_sample(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    v: Tensor,
    names: Sequence[str],
    sums: dict[str, Tensor],
) -> None:
    """Add the squared gradients of these parameters, from every sample's own gradient."""

    def value(wanted: dict[str, Tensor], sample: Tensor, signal: Tensor) -> Tensor:
        logits: Tensor = functional_call(network, {**tensors, **wanted}, (sample.unsqueeze(0),))
        return (logits.squeeze(0) * signal).sum()

    wanted = {name: tensors[name] for name in names}
    of_samples = vmap(grad(value), in_dims=(None, 0, 0))
    for some in chunks(len(x), sum(tensor.numel() for tensor in wanted.values())):
        for name, own in of_samples(wanted, x[some], v[some]).items():
            sums[name] += own.detach().square().sum(0)


@contextmanager
def _constant_statistics(network: nn.Module, also_training: bool) -> Iterator[None]:
    """Within the context, BatchNorm layers without running statistics use the first batch's statistics as constants.
    With ``also_training``, so do those that are in training mode."""
    norms = [m for m in network.modules() if isinstance(m, _BatchNorm)]
    layers = [m for m in norms if m.running_mean is None or (also_training and m.training)]
    before = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def hook(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        if layer not in found:
            x = inputs[0].detach()
            variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0)
            found[layer] = (mean, variance)
        layer.running_mean, layer.running_var = found[layer]

    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, mean, variance in before:
            layer.running_mean, layer.running_var = mean, variance
