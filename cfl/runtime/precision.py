"""In what precision float32 products are computed: as asked for in local steps, truly so between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within the context torch's float32 matmul precision is this one: ``highest``, ``high`` or ``medium``.

    Convolutions follow: of its own accord cuDNN computes them in TF32, whatever holds for other products.
    """
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def full_precision() -> AbstractContextManager[None]:
    """Within the context float32 products are float32, whatever the process allows otherwise.

    What is computed between local steps decides what later tasks may change, by shares and angles that TF32's rounding
    of a thousandth would drown: the residual of an input inside a basis is 1e-7 of it, or 1e-3.
    """
    return matmul_precision("highest")
