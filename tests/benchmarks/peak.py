"""The machine's arithmetic peak, as far as a matrix product shows it."""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

from benchmarks.accelerator import wait
from benchmarks.wire import Report, Wire, serve
from cfl.engines.products import OneDnnProducts, Products, available

SIDE = 2048
TRIALS = 6


def matrix_product_flops(side: int) -> int:
    """FLOPs of the product of two square matrices: a multiplication and an addition per term."""
    return 2 * side**3


def best_product(side: int = SIDE, trials: int = TRIALS, device: str = "cpu") -> Report:
    """Rate of the fastest of several float32 products ``[side, side] @ [side, side]`` with all math threads.

    Every available library is tried. On a GPU, sides are four times as long and products are true float32.

    Returns:
        ``flops_per_second``.
    """
    side = 4 * side if device != "cpu" else side
    a, b = (torch.randn(side, side, generator=torch.Generator().manual_seed(n)).to(device) for n in range(2))
    libraries = [Products(), OneDnnProducts()] if available() and device == "cpu" else [Products()]
    seconds = []
    for _ in range(trials):
        for products in libraries:
            wait(device)
            started = time.perf_counter()
            products.of(a, b)
            wait(device)
            seconds.append(time.perf_counter() - started)
    return {"flops_per_second": matrix_product_flops(side) / min(seconds)}


if __name__ == "__main__":
    product = partial(best_product, device=sys.argv[1])
    serve(Wire.from_descriptor(int(sys.argv[2])), {"threads": torch.get_num_threads()}, product)
