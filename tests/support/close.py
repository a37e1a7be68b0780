"""Comparison of two models, or of any other tensors by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 1e-11) -> None:
    """Require equal names, and values that agree up to float64's rounding or to ``atol``."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=atol)


def farthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The greatest difference between entries, over the names of ``b``."""
    return max(float((a[name] - b[name]).abs().max()) for name in b)
