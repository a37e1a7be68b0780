"""Checks labels that were read from a file, and numbers the clients that own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.types import ImageSet

_MOST_ROUNDING = 1e-3
"""Largest change of a number by rounding to float32, as a share of the standard deviation of all numbers."""
_CONSTANT = 1e-12
"""Numbers whose standard deviation is at most this share of their size are all the same."""


def checked_labels(stored: NDArray[Any], name: str) -> NDArray[np.int64]:
    """Labels as int64.

    Args:
        stored: ``[N]``, as read.
        name: of the array, for messages.

    Raises:
        ValueError: labels are no integers, or below 0, or too large for int64.
    """
    if stored.ndim != 1 or not np.issubdtype(stored.dtype, np.integer):
        raise ValueError(f"{name} are {stored.dtype} {list(stored.shape)}, not integers [N]")
    if stored.size and not 0 <= int(stored.min()) <= int(stored.max()) <= np.iinfo(np.int64).max:
        raise ValueError(f"{name} run from {stored.min()} to {stored.max()}; valid: integers from 0, below 2^63")
    return stored.astype(np.int64)


def checked_numbers(stored: NDArray[Any], name: str) -> NDArray[np.float32]:
    """Numbers to predict as float32 ``[N, D]``.

    Numbers are refused if rounding to float32 changes one by more than a thousandth of their standard deviation.

    Args:
        stored: ``[N]`` or ``[N, D]``, as read.
        name: of the array, for messages.

    Raises:
        ValueError: labels are no numbers, not finite, or too far from 0 for their spread.
    """
    if stored.ndim not in (1, 2) or stored.dtype.kind not in "iuf":
        raise ValueError(f"{name} are {stored.dtype} {list(stored.shape)}, not numbers [N] or [N, D]")
    with np.errstate(over="ignore"):  # is refused below
        found = stored.astype(np.float32).reshape(len(stored), -1)
    if not np.isfinite(found).all():
        raise ValueError(f"{name} hold NaN or infinity, or numbers that float32 cannot")
    exact = stored.astype(np.float64).reshape(len(stored), -1)
    spread = exact.std(0) if len(exact) else exact.sum(0)
    varies = spread > _CONSTANT * np.abs(exact).max(0, initial=0)
    if (np.abs(found - exact) > _MOST_ROUNDING * spread)[:, varies].any():
        raise ValueError(f"{name} differ too little for their size to be float32; subtract a number from all of them")
    return found


def codes_of(names: NDArray[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """``[N]`` int64 from 0 for ``[N]`` names or numbers, in their order; and the different names or numbers."""
    found, places = np.unique(names, return_inverse=True)
    return torch.from_numpy(places.astype(np.int64)), tuple(found.tolist())


def common_names(sets: Sequence[ImageSet]) -> tuple[Any, ...]:
    """The different names or numbers of the clients of all sets, ascending; as texts if some are texts."""
    different = {name for samples in sets for name in samples.client_names}
    whole = all(isinstance(name, int) for name in different)
    return tuple(sorted(different) if whole else sorted({*map(str, different)}))


def renumbered(samples: ImageSet, names: tuple[Any, ...]) -> ImageSet:
    """The same samples, whose clients have the numbers that ``names`` give their names; -1 if they are not among these.

    Samples whose clients are unknown, or have numbers without names, stay as they are.
    """
    if samples.clients is None or samples.client_names in ((), names):
        return samples
    places = {str(name): place for place, name in enumerate(names)}
    own = torch.tensor([places.get(str(name), -1) for name in samples.client_names])
    return replace(samples, clients=own[samples.clients], client_names=names)


def first_absent(labels: NDArray[np.int64] | Tensor, num_classes: int) -> tuple[int, int] | None:
    """Number of the ``num_classes`` classes without a sample, and the first of them; None if there are none.

    Takes no more memory than the labels do, however many classes there are.
    """
    present = np.unique(np.asarray(labels))
    present = present[present < num_classes]
    if len(present) >= num_classes:
        return None
    gaps = np.flatnonzero(present != np.arange(len(present)))
    return num_classes - len(present), int(gaps[0]) if len(gaps) else len(present)
