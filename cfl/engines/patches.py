"""Convolutions of stacked clients as products of patches.

``vmap`` turns the convolutions of K clients into one convolution with K groups, which cuDNN computes one after another.
Products of K matrices are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_PATCH_BYTES = 2**31
"""Bytes that the patches of one convolution may take; torch computes larger convolutions."""

Pair = tuple[int, int]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: str | int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    channels_last: bool = True,
) -> Tensor:
    """As ``torch.nn.functional.conv2d``, by patches under ``vmap``.

    Torch's own convolution is used with groups, with padding given as a word, and if patches would take more than
    :data:`MOST_PATCH_BYTES`.

    Args:
        input: ``[B, C, H, W]``.
        weight: ``[O, C, h, w]``.
        bias: ``[O]``, or None.
        stride: as for torch, and so are padding, dilation and groups.
        channels_last: whether the result ``[B, O, H', W']`` has the channels last in memory.
    """
    if groups != 1 or isinstance(padding, str):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    found: Tensor = _Convolution.apply(input, weight, _pair(stride), _pair(padding), _pair(dilation), channels_last)
    return found if bias is None else found + bias.view(-1, 1, 1)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def mapped(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """A tensor as ``[count, ...]``; ``vmap`` maps it over ``dim``, or does not map it if ``dim`` is None."""
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class _Convolution(torch.autograd.Function):
    """``conv2d`` of one client; under ``vmap``, that of all clients by patches."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, channels_last: bool
    ) -> Tensor:
        return F.conv2d(input, weight, None, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        raise RuntimeError("convolutions by patches are for vmap")

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        input: Tensor,
        weight: Tensor,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        channels_last: bool,
    ) -> tuple[Tensor, int]:
        x, w = (mapped(tensor, dim, info.batch_size) for tensor, dim in zip((input, weight), dims, strict=False))
        places = x.shape[1] * _sides(x.shape[3:], w.shape[3:], stride, padding, dilation).numel()
        if len(x) * places * w[0, 0].numel() * x.element_size() <= MOST_PATCH_BYTES:
            found: Tensor = _Patches.apply(x, w, stride, padding, dilation)
            return found if channels_last else found.contiguous(), 0
        k, b, c, o = *x.shape[:3], w.shape[1]
        images, weights = x.transpose(0, 1).reshape(b, k * c, *x.shape[3:]), w.flatten(0, 1)
        joined = F.conv2d(images, weights, None, stride, padding, dilation, k)
        return joined.view(b, k, o, *joined.shape[2:]).transpose(0, 1), 0


class _Patches(torch.autograd.Function):
    """Convolutions ``[K, B, C, H, W]`` with weights ``[K, O, C, h, w]`` to ``[K, B, O, H', W']``, the channels last in
    memory. Patches are made anew for the weights' gradient, because they are h w times as large as the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
        images = _images(x, padding)
        ctx.geometry, ctx.shape = (stride, padding, dilation), x.shape
        ctx.save_for_backward(images, weight)
        patches, sides = _patches(images, weight.shape[3:], stride, dilation)
        found = torch.bmm(patches, _matrices(weight)).view(*x.shape[:2], *sides, -1).permute(0, 1, 4, 2, 3)
        # The same memory, but not as a view: the next layer may change it in place, which autograd refuses for views.
        return found.new_empty(0).set_(found.untyped_storage(), 0, found.shape, found.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        k, o, c, *kernel = weight.shape
        slopes = gradient.permute(0, 1, 3, 4, 2).reshape(k, -1, o)
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            patches, _ = _patches(images, kernel, stride, dilation)
            found = torch.bmm(patches.transpose(1, 2), slopes)
            del patches
            of_weight = found.view(k, *kernel, c, o).permute(0, 4, 3, 1, 2).contiguous()
        if ctx.needs_input_grad[0]:
            of_patches = torch.bmm(slopes, _matrices(weight).transpose(1, 2))
            of_x = _added_up(of_patches, images.shape, kernel, stride, dilation)
            of_x = of_x[:, :, padding[0] : padding[0] + ctx.shape[3], padding[1] : padding[1] + ctx.shape[4]]
            of_x = of_x.permute(0, 1, 4, 2, 3)
        return of_x, of_weight, None, None, None


def _images(x: Tensor, padding: Pair) -> Tensor:
    """``[K, B, C, H, W]`` to padded ``[K, B, H, W, C]``, contiguous."""
    images = x.permute(0, 1, 3, 4, 2)
    if any(padding):
        return F.pad(images, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    return images.contiguous()


def _matrices(weight: Tensor) -> Tensor:
    """``[K, O, C, h, w]`` to ``[K, h w C, O]``."""
    return weight.permute(0, 3, 4, 2, 1).reshape(len(weight), -1, weight.shape[1])


def _sides(sides: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair) -> torch.Size:
    """Height and width of a convolution's maps."""
    zipped = zip(sides, kernel, stride, padding, dilation, strict=True)
    return torch.Size([(side + 2 * p - d * (size - 1) - 1) // s + 1 for side, size, s, p, d in zipped])


def _patches(images: Tensor, kernel: Sequence[int], stride: Pair, dilation: Pair) -> tuple[Tensor, torch.Size]:
    """Contiguous images ``[K, B, H, W, C]`` to patches ``[K, B H' W', h w C]``, and ``(H', W')``."""
    k, b, *images_sides, c = images.shape
    sides = _sides(images_sides, kernel, stride, (0, 0), dilation)
    of_k, of_b, of_row, of_column, _ = images.stride()
    steps = (of_row * stride[0], of_column * stride[1], of_row * dilation[0], of_column * dilation[1])
    windows = images.as_strided((k, b, *sides, *kernel, c), (of_k, of_b, *steps, 1))
    return windows.reshape(k, b * sides.numel(), -1), sides


def _added_up(patches: Tensor, shape: torch.Size, kernel: Sequence[int], stride: Pair, dilation: Pair) -> Tensor:
    """Patches ``[K, B H' W', h w C]`` to images ``[K, B, H, W, C]``, summed where they overlap."""
    sides = _sides(shape[2:4], kernel, stride, (0, 0), dilation)
    parts = patches.view(*shape[:2], *sides, *kernel, shape[4])
    images = patches.new_zeros(shape)
    for i, j in product(range(kernel[0]), range(kernel[1])):
        top, left = i * dilation[0], j * dilation[1]
        bottom, right = top + stride[0] * (sides[0] - 1) + 1, left + stride[1] * (sides[1] - 1) + 1
        images[:, :, top : bottom : stride[0], left : right : stride[1]] += parts[:, :, :, :, i, j]
    return images
