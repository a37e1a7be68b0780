"""Matrix products of hand-written steps: by torch's BLAS, or by oneDNN.

On a CPU torch computes float32 products by the BLAS that it was built with, which for x86 is MKL. MKL uses AVX-512 only
on processors of its own maker. oneDNN, which torch uses for convolutions, uses whatever the processor supports, and is
nearly twice as fast on other makers' processors. Elsewhere both are equally fast, or MKL is faster. :func:`faster`
measures this.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import List, Literal, Optional, Union  # noqa: UP035  torch.jit wants them

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.engines.threads import Threads

Library = Literal["blas", "onednn"]

WORTH_ONEDNN = 2**20
"""Number of multiplications in a product from which oneDNN computes it. A call of oneDNN takes some 10 us more than one
of MKL, which does this many multiplications in 17 us at 125 GFLOP/s."""

BLOCK = 2**18
"""Numbers of a product that :meth:`OneDnnProducts.add` computes at a time, because oneDNN itself cannot add a product
to a tensor. They take 1 MiB, which is still in the cache when they are added."""


class Products:
    """Matrix products by torch's own functions, in any data type."""

    library: Library = "blas"
    adds_at_once = True
    """Whether :meth:`add` needs no memory for the product."""

    def of_step(self, samples: int) -> Products:
        """The products to use in a step of one client with this number of samples."""
        return self

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right``, ``[m, k]`` and ``[k, n]`` to ``[m, n]``."""
        return left @ right

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``h weight^T + bias``, ``[m, k]``, ``[n, k]`` and ``[n]`` to ``[m, n]``."""
        return F.linear(h, weight, bias)

    def add(self, into: Tensor, left: Tensor, right: Tensor, keep: float, scale: float) -> None:
        """``into <- keep into + scale left @ right``, ``[m, n]``; with ``keep`` 0, ``into`` may hold anything."""
        into.addmm_(left, right, beta=keep, alpha=scale)


class OneDnnProducts(Products):
    """Float32 products by oneDNN if they are large enough to gain from it, all others as :class:`Products`.

    oneDNN compiles a program for every shape, which takes about a millisecond and 0.1 to 0.5 MB. It drops programs when
    it has some hundred. Clients' last batches may have any size, so steps without whole batches use BLAS.

    Args:
        batch_size: samples of a whole batch.

    Raises:
        RuntimeError: this build of torch has no oneDNN.
    """

    library = "onednn"
    adds_at_once = False

    def __init__(self, batch_size: int = 1) -> None:
        self.batch_size = batch_size
        self._linear = _linear()

    def of_step(self, samples: int) -> Products:
        """These products for multiples of ``batch_size``, as with replayed samples; torch's for other numbers."""
        return self if samples % self.batch_size == 0 else Products()

    def of(self, left: Tensor, right: Tensor) -> Tensor:
        """``left @ right``; either may be a transposed view."""
        return self._linear(left, right.t(), None) if _worth_it(left, right) else left @ right

    def linear(self, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``h weight^T + bias``."""
        return self._linear(h, weight, bias) if _worth_it(h, weight.t()) else F.linear(h, weight, bias)

    def add(self, into: Tensor, left: Tensor, right: Tensor, keep: float, scale: float) -> None:
        """``into <- keep into + scale left @ right``."""
        if not _worth_it(left, right):
            super().add(into, left, right, keep, scale)
            return
        if keep not in (0, 1):
            into.mul_(keep)
        m, n = int(into.shape[0]), int(into.shape[1])
        blocks = min(-(-m * n // BLOCK), m)
        rows = -(-m // blocks)  # of equal size, because each shape needs a program
        for start in range(0, m, rows):
            block = into[start : start + rows]
            product = self._linear(left[start : start + rows], right.t(), None)
            if keep == 0:
                block.copy_(product if scale == 1 else product.mul_(scale))
            else:
                block.add_(product, alpha=scale)


def products_of(library: Library, batch_size: int = 1) -> Products:
    """The products of a library, for batches of ``batch_size`` samples."""
    return OneDnnProducts(batch_size) if library == "onednn" else Products()


def worth_onednn(m: int, k: int, n: int) -> bool:
    """Whether a product of ``[m, k]`` and ``[k, n]`` may be faster by oneDNN: it is large, and not with a vector."""
    return min(m, k, n) > 1 and m * k * n >= WORTH_ONEDNN


def _worth_it(left: Tensor, right: Tensor) -> bool:
    # Plain numbers even while a step is recorded, because a recording is for one batch size.
    sizes = int(left.shape[0]), int(left.shape[1]), int(right.shape[1])
    return left.dtype is torch.float32 and worth_onednn(*sizes)


@cache
def available() -> bool:
    """Whether torch was built with oneDNN, and still has the operation that is used here."""
    try:
        x, weight = torch.ones(2, 3), torch.full((4, 3), 2.0)
        return torch.equal(_linear()(x, weight, torch.ones(4)), torch.full((2, 4), 7.0))
    except Exception:  # whatever torch.jit raises, where it is deprecated or has no source files
        return False


@cache
def _linear() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError("torch was built without oneDNN")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit is deprecated
        # Scripted, since a recording by torch.jit.trace takes no list of optional numbers.
        scripted: Callable[[Tensor, Tensor, Tensor | None], Tensor] = torch.jit.script(_linear_of_onednn)
    return scripted


def _linear_of_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:  # noqa: UP045  torch.jit wants it
    # The operation that torch.compile makes of linear layers on a CPU. No public one calls oneDNN's float32 product.
    none = torch.jit.annotate(List[Optional[Union[int, float, complex]]], [])  # noqa: UP006, UP007, UP045
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", none, "")


@cache
def faster() -> Library:
    """The library that is faster on this machine, by the best of five timings of one product each, in turns.

    The product is of ``[64, 400]`` and ``[400, 400]`` on one math thread, as in workers. This takes 0.1 s in all.
    """
    if not available():
        return "blas"
    h, weight = torch.ones(64, 400), torch.ones(400, 400)
    best: dict[Library, float] = {}

    def measure(_: int, products: Products) -> None:
        started = time.perf_counter()
        products.linear(h, weight, None)
        seconds = time.perf_counter() - started
        best[products.library] = min(best.get(products.library, seconds), seconds)

    Threads(1).run(measure, [Products(), OneDnnProducts()] * 5)
    return min(best, key=best.__getitem__)
