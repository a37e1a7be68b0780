"""Records in which products, convolutions and normalisations a forward pass uses parameters, with inputs and outputs.

Torch's functions are watched, not modules, so that it does not matter which module calls them, whether its ``forward``
was replaced, or what hooks do before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from cfl.methods.components.curvature.layer_squares import (
    Convolution,
    convolution_squares,
    linear_squares,
    normalisation_squares,
)

Squares = Callable[[Tensor, Tensor, bool], tuple[Tensor | None, Tensor]]


@dataclass
class LayerCall:
    """One call of a function that multiplies an input with a weight and adds a bias.

    Attributes:
        weight: name of the weight, or None if its squares are not needed.
        bias: name of the bias, likewise.
        factor: constant that the weight was multiplied with before, or None.
        input: the function's input.
        output: its output, which requires a gradient.
        squares: sums over samples of the squared gradients of weight and bias, given inputs ``[B, ...]``, the outputs'
            gradients and whether the weight's are needed.
    """

    weight: str | None
    bias: str | None
    factor: Tensor | None
    input: Tensor
    output: Tensor
    squares: Squares

    def add_squares(self, d: Tensor, sums: dict[str, Tensor]) -> None:
        """Add the squared gradients of those parameters that ``sums`` names, given the outputs' gradients ``d``."""
        wanted = self.weight is not None and self.weight in sums
        of_weight, of_bias = self.squares(self.input.detach(), d.detach(), wanted)
        if self.weight is not None and wanted and of_weight is not None:
            if self.factor is not None:
                of_weight = of_weight * self.factor.to(of_weight.dtype).square()
            sums[self.weight] += of_weight
        if self.bias is not None and self.bias in sums:
            sums[self.bias] += of_bias


def recorded_pass(
    network: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, names: Sequence[str]
) -> tuple[Tensor, dict[str, LayerCall]]:
    """Call a network, and find the parameters that are used once, in a function with squares in closed form.

    Args:
        network: the network.
        tensors: all its parameters and buffers, without gradients.
        x: its input.
        names: the parameters to look for.

    Returns:
        The network's output, and name -> the only call that uses the parameter. If the network reads values of tensors,
        what it computes for a sample may depend on the rest of the batch. The output is then computed sample by sample,
        and there are no calls.
    """
    tensors = dict(tensors)
    with torch.enable_grad(), _Recording(tensors, names) as recording:
        logits = functional_call(network, tensors, (x,))
    if recording.reads_values:
        with torch.no_grad():
            return torch.cat([functional_call(network, tensors, (one,)) for one in x.split(1)]), {}
    return logits, recording.only_calls()


# Attributes and methods of tensors that do not read their values, and functions that hand values to Python or whose
# result has a shape that depends on values.
_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_contiguous")),
}
_METHODS = ("__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy", "unique")
_FUNCTIONS = ("equal", "allclose", "nonzero", "argwhere", "masked_select")
_READING = {
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(owner, name) for owner in (Tensor, torch) for name in _FUNCTIONS),
}


def _reads_values(func: Any, args: Sequence[Any]) -> bool:
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], list | tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in index)
    return func in _READING


class _Recording(TorchFunctionMode):
    """Within the context, records all uses of the named tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        super().__init__()
        self._names = {id(tensors[name]): name for name in names}
        self._products: dict[int, tuple[str, Tensor, Tensor]] = {}  # identity -> weight's name, factor, the product
        self._uses: dict[str, list[LayerCall | None]] = {name: [] for name in names}
        self.reads_values = False

    def only_calls(self) -> dict[str, LayerCall]:
        """Name -> the call, for tensors whose only use is a call with known squares."""
        return {name: uses[0] for name, uses in self._uses.items() if len(uses) == 1 and uses[0] is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        self.reads_values |= _reads_values(func, args)
        used = sorted(self._named_in((*args, *kwargs.values())))
        result = func(*args, **kwargs)
        if not used or (func is Tensor.mul and self._is_product(result, *args)):
            return result
        call = self._call(func, args, kwargs, result) if torch.is_grad_enabled() else None
        if call is not None and used != sorted(name for name in (call.weight, call.bias) if name is not None):
            call = None
        for name in used:
            self._uses[name].append(call)
        return result if call is None else call.output.clone()  # later operations may change it in place

    def _named_in(self, values: Sequence[Any]) -> Iterator[str]:
        for value in values:
            for part in value if isinstance(value, list | tuple) else (value,):
                name = self._name(part)
                if name is not None:
                    yield name

    def _name(self, value: Any) -> str | None:
        product = self._products.get(id(value))
        return self._names.get(id(value)) if product is None else product[0]

    def _is_product(self, result: Any, a: Any, b: Any = None) -> bool:
        """Whether this is a tensor multiplied with a constant entry by entry; it is then remembered."""
        of, factor = (a, b) if id(a) in self._names else (b, a)
        name = self._names.get(id(of))
        if (
            name is None
            or factor is None
            or self._name(factor) is not None
            or result.requires_grad
            or not torch.is_grad_enabled()
        ):
            return False
        if result.shape != of.shape or result.dtype != of.dtype:
            return False
        self._products[id(result)] = (name, torch.as_tensor(factor, device=of.device), result)
        return True

    def _call(self, func: Any, args: Any, kwargs: Any, output: Any) -> LayerCall | None:
        found = _FORMS[func](*args, **kwargs) if func in _FORMS else None
        if found is None:
            return None
        input, weight, bias, squares = found
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        factor = self._products[id(weight)][1] if id(weight) in self._products else None
        return LayerCall(self._name(weight), self._names.get(id(bias)), factor, input, output, squares)


# Functions with known squares, with torch's names of their arguments. Each gives input, weight, bias and squares, or
# None for arguments that the squares do not cover.

_Form = tuple[Tensor, Tensor | None, Tensor | None, Squares]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Form | None:
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return input, weight, bias, linear_squares


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Form | None:
    if isinstance(padding, str):
        return None
    kernel_size, stride, padding, dilation = map(_pair, (weight.shape[2:], stride, padding, dilation))
    convolution = Convolution(kernel_size, stride, padding, dilation, groups)

    def squares(a: Tensor, d: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
        return convolution_squares(convolution, a, d, wanted)

    return input, weight, bias, squares


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values[0], values[-1]


def _batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> _Form | None:
    if training:
        return None
    deviation = (running_var + eps).sqrt()

    def squares(a: Tensor, d: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
        return normalisation_squares(a, d, running_mean, deviation)

    return input, weight, bias, squares


_FORMS: dict[Any, Callable[..., _Form | None]] = {F.linear: _linear, F.conv2d: _conv2d, F.batch_norm: _batch_norm}
