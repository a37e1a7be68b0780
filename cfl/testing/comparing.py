"""Describes the differences between two results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def difference(found: Any, expected: Any, tolerance: float = 0.0, place: str = "") -> str | None:
    """Describe the greatest difference between two nested results; None if there is none.

    Seconds (keys with ``seconds`` in them) are ignored, because they differ between runs.

    Args:
        found: tensors, numbers and plain values in mappings and sequences.
        expected: the values to compare with, nested in the same way.
        tolerance: allowed difference of floating-point numbers, relative to the greatest entry if that is above 1. At 0
            they must be the same bit for bit, including NaN.
        place: name of the two values in the text.

    Returns:
        A text such as ``head.weight differs by 0.012``, or None.
    """
    worst = max(_differences(found, expected, tolerance, place), default=None, key=lambda pair: pair[0])
    return None if worst is None else worst[1]


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Greatest difference of a tensor that both models have; BatchNorm's counters of batches are ignored.

    It is infinite where one of them has NaN or infinity and the other another value.
    """
    common = [n for n in expected if n in found and "num_batches" not in n]
    return max((_gap(found[n], expected[n]) for n in common), default=0.0)


def _gap(found: Tensor, expected: Tensor) -> float:
    """Greatest difference of two tensors in float64; NaN in both, and equal infinities, differ by 0."""
    found, expected = found.detach().double(), expected.detach().double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    gaps = torch.where(same, 0.0, (found - expected).abs()).nan_to_num(float("inf"), float("inf"))
    return float(gaps.max()) if gaps.numel() else 0.0


def _differences(found: Any, expected: Any, tolerance: float, place: str) -> list[tuple[float, str]]:
    """All differences, each with its size; infinite for differences that are not numbers."""
    inf = float("inf")
    found, expected = (torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in (found, expected))
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return [(inf, f"{place} is {kind_of(found)} instead of {kind_of(expected)}")]
        return _of_tensors(found, expected, tolerance, place)
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if set(found) != set(expected):
            names = sorted(map(str, set(found) ^ set(expected)))
            return [(inf, f"{place or 'the result'} has {names} in one of them alone")]
        parts = [(f"{place}.{k}".lstrip("."), found[k], expected[k]) for k in expected if "seconds" not in str(k)]
        return [each for name, one, other in parts for each in _differences(one, other, tolerance, name)]
    if _is_list(expected) and _is_list(found):
        if len(found) != len(expected):
            return [(inf, f"{place} has {len(found)} entries instead of {len(expected)}")]
        pairs = enumerate(zip(found, expected, strict=True))
        return [each for i, (a, b) in pairs for each in _differences(a, b, tolerance, f"{place}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        pair = torch.tensor([found, expected], dtype=torch.float64)
        return _of_tensors(pair[0], pair[1], tolerance, place)
    return [] if repr(found) == repr(expected) else [(inf, f"{place} is {found!r} instead of {expected!r}")]


def _of_tensors(found: Tensor, expected: Tensor, tolerance: float, place: str) -> list[tuple[float, str]]:
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if torch.equal(_bits(found), _bits(expected)):
        return []
    if not torch.equal(found.isnan(), expected.isnan()):
        return [(float("inf"), f"{place} has NaN in one of them alone")]
    gaps = (found.double() - expected.double()).abs()
    by = float(torch.where(found == expected, 0.0, gaps).nan_to_num(0.0, float("inf")).max())
    allowed = tolerance * max(1.0, float(expected.double().nan_to_num(0.0, 0.0, 0.0).abs().max()))
    if found.is_floating_point() and tolerance > 0 and by <= allowed:
        return []
    return [(by, f"{place} differs by {by:.3g}")]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def kind_of(tensor: Tensor) -> str:
    """A tensor's dtype and shape, such as ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
