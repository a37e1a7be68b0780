"""Chains that hold the batch innermost in memory, ``[C, H, W, B]`` and ``[F, B]``: the fast way with small maps.

A convolution is one product, ``Z = W X`` with ``W [O, C kh kw]`` and the patches ``X [C kh kw, Ho Wo B]``. With the
samples side by side, copying patches, adding up their gradients and pooling work on runs of at least B numbers, even if
maps are few and small. A batch's maps are a linear layer's input without a copy. The step can be recorded. For many
wide maps torch's own kernels are faster. The engine's trial decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from cfl.engines import layers
from cfl.engines.chain import Chain
from cfl.engines.layers import Layer, Pass
from cfl.engines.products import Products


class BatchLastChain(Chain):
    """A chain of one client's layers with the batch last; :meth:`of_chain` makes it of an ordinary chain.

    Both compute the same up to float rounding. Inputs and logits have the batch first.
    """

    def __init__(self, links: list[Layer], products: Products) -> None:
        super().__init__(links, products)
        self.stackable, self.has_convolutions = False, True

    @classmethod
    def of_chain(cls, chain: Chain) -> BatchLastChain | None:
        """A chain with the same layers and products; None if it has convolutions in groups."""
        links = [_batch_last(layer) for layer in chain.layers]
        return None if None in links else cls([link for link in links if link is not None], chain.products)

    def enter(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[C, H, W, B]``."""
        return x.permute(1, 2, 3, 0).contiguous()

    def turn(self, matrix: Tensor) -> Tensor:
        """``[O, B]`` to ``[B, O]`` and back."""
        return matrix.t().contiguous()


def _batch_last(layer: Layer) -> Layer | None:
    if isinstance(layer, layers.Conv2d) and layer.groups != 1:
        return None
    if isinstance(layer, layers.Relu):
        return layer
    return _OF[type(layer)](layer)


class Linear(Layer):
    """``nn.Linear`` on ``[d, B]``."""

    weighted = True

    def __init__(self, of: layers.Linear) -> None:
        self.weight, self.bias = of.weight, of.bias

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """``Z = W H + b``."""
        run.saved.append(h)
        return _product(run, self.weight, self.bias, h)

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """``dH = W^T dZ``, ``dW = dZ H^T``, ``db`` the sum over samples."""
        h = run.saved.pop()
        inner = run.products.of(run.weights[self.weight].t(), g) if wanted else None
        _hand_over(run, self.weight, self.bias, g, h)
        return inner


class Conv2d(Layer):
    """``nn.Conv2d`` with zero padding and without groups on ``[C, H, W, B]``."""

    weighted = True

    def __init__(self, of: layers.Conv2d) -> None:
        self.weight, self.bias = of.weight, of.bias
        self.kernel, self.stride, self.padding, self.dilation = of.kernel, of.stride, of.padding, of.dilation

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Multiply the weight with the patches, in one product."""
        height, width = self.padding
        if height or width:
            h = F.pad(h, (0, 0, width, width, height, height))
        shape, strides = self._windows(h)
        # Contiguous, because patches in a row of a single channel may be an overlapping view, which oneDNN cannot read.
        patches = h.as_strided(shape, strides).reshape(math.prod(shape[:3]), -1).contiguous()
        run.saved.append((patches, shape, _sizes(h)))
        return _product(run, self.weight, self.bias, patches).view(-1, *shape[3:])

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """``dX = W^T dZ`` added up where patches overlap, ``dW = dZ X^T``."""
        patches, shape, padded = run.saved.pop()
        g = g.flatten(1)
        inner = None
        if wanted:
            by_rows = run.products.adds_at_once and self._gains_by_rows(shape, len(g))
            inner = (self._added_by_rows if by_rows else self._added_one_by_one)(run, g, shape, padded)
            (height, width), (_, rows, columns, _) = self.padding, padded
            if height or width:
                inner = inner[:, height : rows - height, width : columns - width].contiguous()
        _hand_over(run, self.weight, self.bias, g, patches)
        return inner

    def _windows(self, h: Tensor) -> tuple[list[int], list[int]]:
        """Shape and strides of ``[C, kh, kw, Ho, Wo, B]``, a view of a padded input."""
        channels, *sides, samples = _sizes(h)
        fit = [
            (side - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, stride, dilation in zip(sides, self.kernel, self.stride, self.dilation, strict=True)
        ]
        channel, row, column, sample = (int(n) for n in h.stride())
        inside = [self.dilation[0] * row, self.dilation[1] * column]
        between = [self.stride[0] * row, self.stride[1] * column]
        return [channels, *self.kernel, *fit, samples], [channel, *inside, *between, sample]

    def _gains_by_rows(self, shape: list[int], outputs: int) -> bool:
        """Whether :meth:`_added_by_rows` saves more on patches than its copy of the weights costs."""
        return self.stride[0] == 1 and shape[1] > 1 and math.prod(shape[3:]) >= 4 * outputs

    def _added_one_by_one(self, run: Pass, g: Tensor, shape: list[int], padded: list[int]) -> Tensor:
        """The padded input's gradient from ``dZ [O, Ho Wo B]``: that of all patches, added up per kernel element."""
        of_patches = run.products.of(run.weights[self.weight].flatten(1).t(), g).view(shape)
        inner = g.new_zeros(padded)
        for i in range(shape[1]):
            for j in range(shape[2]):
                self._place(inner, shape, i, j).add_(of_patches[:, i, j])
        return inner

    def _added_by_rows(self, run: Pass, g: Tensor, shape: list[int], padded: list[int]) -> Tensor:
        """As :meth:`_added_one_by_one`, by one product per row of the kernel, which is added where patches overlap.

        The products are in ``[C, kw, H, Wo, B]`` instead of ``[C, kh, kw, Ho, Wo, B]``.
        """
        channels, kernel_rows, kernel_columns, high, wide, samples = shape
        weight = run.weights[self.weight].permute(2, 1, 3, 0).flatten(1, 2)  # [kh, C kw, O]
        row = wide * samples
        of_columns = g.new_zeros(channels * kernel_columns, padded[1] * row)
        for i in range(kernel_rows):
            first = i * self.dilation[0] * row
            run.products.add(of_columns[:, first : first + high * row], weight[i], g, 1, 1)
        inner = g.new_zeros(padded)
        of_columns = of_columns.view(channels, kernel_columns, padded[1], wide, samples)
        for j in range(kernel_columns):
            inner[:, :, _every(j * self.dilation[1], self.stride[1], wide)].add_(of_columns[:, j])
        return inner

    def _place(self, padded: Tensor, shape: list[int], i: int, j: int) -> Tensor:
        """The view ``[C, Ho, Wo, B]`` of a padded input that the kernel's element ``i, j`` is multiplied with."""
        rows = _every(i * self.dilation[0], self.stride[0], shape[3])
        return padded[:, rows, _every(j * self.dilation[1], self.stride[1], shape[4])]


class MaxPool2d(layers.MaxPool2d):
    """Max-pooling of ``[C, H, W, B]``, which torch's kernel sees as C images of B channels, the channels last."""

    def __init__(self, of: layers.MaxPool2d) -> None:
        self.geometry = of.geometry

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Return the maxima, and keep their places."""
        return super().forward(run, h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Put the gradient at the places of the maxima."""
        inner = super().backward(run, g.permute(0, 3, 1, 2), wanted)
        return None if inner is None else inner.permute(0, 2, 3, 1)


class Dropout(Layer):
    """Counted dropout in place, of ``[..., B]``."""

    def __init__(self, of: layers.Dropout) -> None:
        self.name = of.name

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """Multiply by the mask."""
        mask = run.masks[self.name].movedim(0, -1).contiguous()
        run.saved.append(mask)
        return h.mul_(mask)

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Multiply by the mask."""
        return g.mul_(run.saved.pop())


class Flatten(Layer):
    """``[C, H, W, B]`` to ``[C H W, B]``, the units in the order (C, H, W)."""

    def __init__(self, of: layers.Flatten) -> None:
        """Take the layer that it replaces, as the other classes do."""

    def forward(self, run: Pass, h: Tensor) -> Tensor:
        """A view."""
        shape = _sizes(h)
        run.saved.append(shape)
        return h.view(-1, shape[-1])

    def backward(self, run: Pass, g: Tensor, wanted: bool) -> Tensor | None:
        """Restore the input's shape."""
        return g.view(run.saved.pop())


def _product(run: Pass, weight: str, bias: str | None, h: Tensor) -> Tensor:
    product = run.products.of(run.weights[weight].flatten(1), h)
    # Not by addmm, because a recording splits it into two operations that round differently.
    return product if bias is None else product.add_(run.weights[bias].unsqueeze(1))


def _hand_over(run: Pass, weight: str, bias: str | None, g: Tensor, h: Tensor) -> None:
    """Hand over the gradients of ``Z = W H + b`` for ``dZ [O, N]`` and ``H [d, N]``."""
    factor = run.factors.get(weight)
    if factor is None:
        run.update.product(weight, g, h.t(), run.products)
    else:
        run.update.gradient(weight, run.multiplied(weight, run.products.of(g, h.t()).view(run.weights[weight].shape)))
    if bias is not None:
        run.update.gradient(bias, run.multiplied(bias, g.sum(1)))


def _every(first: int, step: int, number: int) -> slice:
    return slice(first, first + step * (number - 1) + 1, step)


def _sizes(h: Tensor) -> list[int]:
    """The shape in plain numbers, even while a step is recorded, because a recording is for one batch size."""
    return [int(size) for size in h.shape]


_OF: dict[type[Layer], Callable[[Any], Layer]] = {
    layers.Linear: Linear,
    layers.Conv2d: Conv2d,
    layers.MaxPool2d: MaxPool2d,
    layers.Dropout: Dropout,
    layers.Flatten: Flatten,
}
