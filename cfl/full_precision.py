"""Products in true float32, whatever local training may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Within the context float32 products are float32, with ``engine.matmul_precision`` below ``highest``, too.

    What is computed between local steps decides what later tasks may change, by shares and angles that TF32's rounding
    of a thousandth would drown: the residual of an input inside a basis is 1e-7 of it, or 1e-3.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
