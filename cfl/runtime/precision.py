"""The precision of float32 products: that of ``engine.matmul_precision`` in local steps, true float32 elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within the context, set torch's float32 matmul precision to ``highest``, ``high`` or ``medium``.

    It is applied to convolutions as well, which cuDNN computes in TF32 by default.
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
    """Within the context, compute float32 products in true float32, whatever the process allows otherwise.

    Methods decide between local steps which directions later tasks may change. TF32's rounding error of a thousandth
    would hide the quantities they compare: the residual of an input inside a basis is 1e-7 of it, or 1e-3 with TF32.
    """
    return matmul_precision("highest")
