"""The machine's arithmetic peak, as far as a matrix product shows it."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.wire import Report, Wire, serve
from cfl.engines.products import OneDnnProducts, Products, available

SIDE = 2048
TRIALS = 6


def matrix_product_flops(side: int) -> int:
    """FLOPs of the product of two square matrices: a multiplication and an addition per term."""
    return 2 * side**3


def best_product(side: int = SIDE, trials: int = TRIALS) -> Report:
    """The best of several float32 products ``[side, side] @ [side, side]`` with all math threads, by every library.

    Returns:
        ``flops_per_second``.
    """
    a, b = (torch.randn(side, side, generator=torch.Generator().manual_seed(n)) for n in range(2))
    libraries = [Products(), OneDnnProducts()] if available() else [Products()]
    seconds = []
    for _ in range(trials):
        for products in libraries:
            started = time.perf_counter()
            products.of(a, b)
            seconds.append(time.perf_counter() - started)
    return {"flops_per_second": matrix_product_flops(side) / min(seconds)}


if __name__ == "__main__":
    serve(Wire.from_descriptor(int(sys.argv[1])), {"threads": torch.get_num_threads()}, best_product)
