"""Layers of stacked clients, computed so that gradients have the memory layout of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from cfl.engines.patches import convolution, mapped

Sgd = tuple[float, float]


class StackedLayers(TorchFunctionMode):
    """Context in which ``linear`` and ``conv2d`` of a function under ``vmap`` are computed in a way that suits CUDA.

    Convolutions are products of patches (:mod:`cfl.engines.patches`). Weights' gradients have the layout of the
    weights; those of ``vmap`` itself are transposed and would have to be copied.

    Args:
        channels_last: leave maps with the channels last in memory. Some of torch's operations refuse such maps under
            ``vmap``, for example BatchNorm on CUDA.
        sgd: learning rate and weight decay of a step that the weights of ``linear`` take in the backward pass, in place
            of a gradient. Allowed only if the function uses each of these weights once.
    """

    def __init__(self, channels_last: bool = False, sgd: Sgd | None = None) -> None:
        super().__init__()
        self._own = {
            F.conv2d: partial(convolution, channels_last=channels_last),
            F.linear: partial(_linear, sgd=sgd),
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._own.get(func, func)(*args, **dict(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, sgd: Sgd | None = None) -> Tensor:
    found: Tensor = _Linear.apply(input, weight, sgd)
    return found if bias is None else found + bias


class _Linear(torch.autograd.Function):
    """``linear`` of one client without bias; under ``vmap``, that of all clients."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, sgd: Sgd | None) -> Tensor:
        return F.linear(input, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise RuntimeError("stacked layers are for vmap")

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], input: Tensor, weight: Tensor, sgd: Sgd | None) -> tuple[Tensor, int]:
        x, w = (mapped(tensor, dim, info.batch_size) for tensor, dim in zip((input, weight), dims, strict=False))
        found: Tensor = _Product.apply(x.reshape(len(x), -1, x.shape[-1]), w, sgd)
        return found.view(*x.shape[:-1], -1), 0


class _Product(torch.autograd.Function):
    """Inputs ``[K, N, D]`` and weights ``[K, O, D]`` to ``[K, N, O]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sgd: Sgd | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sgd = sgd
        return torch.bmm(x, weight.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.sgd is not None:
            lr, decay = ctx.sgd
            weight.detach().baddbmm_(gradient.transpose(1, 2), x, beta=1 - lr * decay, alpha=-lr)
        elif ctx.needs_input_grad[1]:
            of_weight = torch.bmm(gradient.transpose(1, 2), x)
        return of_x, of_weight, None
