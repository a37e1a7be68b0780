"""Layers of a chain: forward and backward of one client, or of a stack of clients, without autograd."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cfl.engines.products import Products
from cfl.engines.right_factors import RightFactor
from cfl.engines.updates import Update

_aten = torch.ops.aten


class Pass:
    """One forward and backward pass of one client, or of a stack of m clients.

    Args:
        weights: parameter name -> ``[...]`` of one client, or ``[m, ...]``.
        masks: dropout layer name -> ``[B, ...]``, or ``[m, B, ...]``.
        update: takes the gradients.
        batch_dims: 1 for one client, whose tensors are ``[B, ...]``; 2 for a stack, ``[m, B, ...]``.
        factors: weight name -> factor by which its gradient is multiplied from the right; for one client only.
        products: multiplies matrices; None is torch's default.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        update: Update,
        batch_dims: int,
        factors: Mapping[str, RightFactor] | None = None,
        products: Products | None = None,
    ) -> None:
        self.weights, self.masks, self.update, self.batch_dims = weights, masks, update, batch_dims
        self.products = products or Products()
        self.factors = factors or {}
        self.saved: list[Any] = []

    def multiplied(self, name: str, gradient: Tensor) -> Tensor:
        """A parameter's gradient ``[o, ...]`` times its factor, if it has one."""
        factor = self.factors.get(name)
        if factor is None:
            return gradient
        return factor.times(gradient.reshape(len(gradient), -1)).view(gradient.shape)


class Layer(ABC):
    """A layer of a chain. It may change the tensors that it is given."""

    weighted = False
    """Whether the layer has parameters."""

    @abstractmethod
    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Return the output for an input; append to ``run.saved`` what :meth:`backward` takes from its end."""

    @abstractmethod
    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Hand over the weights' gradients; return the gradient by the input, if ``wanted``, for that by the output."""


class Linear(Layer):
    """``nn.Linear`` of one client, or of a stack by one batched product."""

    weighted = True

    def __init__(self, name: str, module: nn.Linear) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if module.bias is not None else None

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """``Z = H W^T + b``."""
        run.saved.append(h)
        weight = run.weights[self.weight]
        if run.batch_dims == 2:
            if self.bias is None:
                return torch.bmm(h, weight.mT)
            return torch.baddbmm(run.weights[self.bias].unsqueeze(1), h, weight.mT)
        return run.products.linear(h, weight, None if self.bias is None else run.weights[self.bias])

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """``dH = dZ W``, ``dW = dZ^T H``, ``db`` the sum over samples."""
        h = run.saved.pop()
        weight, inner = run.weights[self.weight], None
        if wanted:
            inner = torch.bmm(g, weight) if run.batch_dims == 2 else run.products.of(g, weight)
        factor = run.factors.get(self.weight)
        if factor is None:
            run.update.product(self.weight, g.mT, h, run.products)
        elif len(h) < g.shape[-1]:  # dW F = dZ^T (H F): multiply H or dW, whichever has fewer rows
            run.update.product(self.weight, g.mT, factor.times(h), run.products)
        else:
            run.update.gradient(self.weight, factor.times(run.products.of(g.mT, h)))
        if self.bias is not None:
            run.update.gradient(self.bias, run.multiplied(self.bias, g.sum(-2)))
        return inner


class Conv2d(Layer):
    """``nn.Conv2d`` of one client."""

    weighted = True

    def __init__(self, name: str, module: nn.Conv2d) -> None:
        self.weight, self.bias = f"{name}.weight", f"{name}.bias" if module.bias is not None else None
        geometry: Any = (module.stride, module.padding, module.dilation)  # no strings: Chain.of has refused them
        self.stride, self.padding, self.dilation = ([int(n) for n in of] for of in geometry)
        self.kernel, self.groups = pair(module.kernel_size), module.groups

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """The convolution."""
        run.saved.append(h)
        bias = None if self.bias is None else run.weights[self.bias]
        return torch.conv2d(h, run.weights[self.weight], bias, self.stride, self.padding, self.dilation, self.groups)

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Gradients by torch's own kernels."""
        h, weight = run.saved.pop(), run.weights[self.weight]
        outputs = [wanted, True, self.bias is not None]
        backward = _recordable_backward() if torch.jit.is_tracing() else _convolution_backward
        geometry = (self.stride, self.padding, self.dilation, self.groups)
        inner, gradient, of_bias = backward(g, h, weight, *geometry, outputs)
        run.update.gradient(self.weight, run.multiplied(self.weight, gradient))
        if self.bias is not None:
            run.update.gradient(self.bias, run.multiplied(self.bias, of_bias))
        return inner if wanted else None


class Relu(Layer):
    """ReLU in place. A dropout that follows may set more of the kept output to zero, where the gradient is zero
    anyway."""

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """``max(h, 0)``."""
        h = h.relu_()
        run.saved.append(h)
        return h

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Set the gradient to zero where the output is zero."""
        h = run.saved.pop()
        return _aten.threshold_backward.grad_input(g, h, 0, grad_input=g)


class Dropout(Layer):
    """Counted dropout in place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Multiply by the mask."""
        return h.mul_(run.masks[self.name])

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Multiply by the mask."""
        return g.mul_(run.masks[self.name])


class MaxPool2d(Layer):
    """Max-pooling of one client."""

    def __init__(self, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
        size = pair(kernel)
        self.geometry = (size, size if stride is None else pair(stride), pair(padding), pair(dilation), ceil)

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Return the maxima, and keep their places."""
        pooled, index = _aten.max_pool2d_with_indices(h, *self.geometry)
        run.saved.append((h, index))
        return pooled

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Put the gradient at the places of the maxima."""
        h, index = run.saved.pop()
        return _aten.max_pool2d_with_indices_backward(g, h, *self.geometry, index)


class Flatten(Layer):
    """``[..., C, H, W]`` to ``[..., C H W]``, the units in the order (C, H, W) whatever the memory format is."""

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """A view, or a copy of channels-last maps."""
        run.saved.append(h.shape)
        return h.flatten(run.batch_dims)

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Restore the input's shape; one client's maps get the channels last in memory, for convolutions."""
        shape = run.saved.pop()
        g = g.view(shape)
        return g.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else g


def _convolution_backward(
    g: Tensor,
    h: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by input, weight and bias; the weight's also stands for each gradient that is not ``wanted``."""
    inner, gradient, of_bias = torch.ops.aten.convolution_backward(
        g, h, weight, [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, wanted
    )
    return inner if wanted[0] else gradient, gradient, of_bias if wanted[2] else gradient


@cache
def _recordable_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """As :func:`_convolution_backward`, for ``torch.jit.trace``, which cannot record its mask of outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit.script is deprecated
        scripted: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.jit.script(_convolution_backward)
    return scripted


def pair(value: Any) -> list[int]:
    """``3`` or ``(3, 3)`` as ``[3, 3]``."""
    return [value, value] if isinstance(value, int) else [int(v) for v in value]
