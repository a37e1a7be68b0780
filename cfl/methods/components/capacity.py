"""Limits the directions that a task adds to a layer's basis, so that later tasks find room in the input space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfl.runtime.errors import ConfigError


def check_capacity(key: str, capacity: Mapping[str, Any] | None) -> None:
    """Refuse a capacity that :func:`room_for` cannot use.

    Raises:
        ConfigError: naming ``key``.
    """
    if capacity is None:
        return
    shares = list(capacity.values()) if isinstance(capacity, Mapping) else []
    if len(shares) != 1 or not set(capacity) <= {"total", "per_task"} or not 0 < shares[0] <= 1:
        raise ConfigError(key, capacity, "{total: share} or {per_task: share}, with a share in (0, 1], or null")


def room_for(capacity: Mapping[str, float] | None, d: int, used: int, extractions_left: int) -> int:
    """The most directions that a task may add to a layer's basis.

    ``total``: all tasks together may use this share of the layer's ``d`` dimensions. The unused part of this share is
    divided evenly among the ``extractions_left``. ``per_task``: a task may take this share of the dimensions that are
    free; after n tasks at least ``(1 - share)^n`` of the space is free, up to rounding. Both round to the nearest
    number, and give at least 1 while dimensions are left.

    Args:
        capacity: one of the two with its share, or None for all that is free.
        d: dimensions of the layer's inputs.
        used: directions of the basis, at most ``d``.
        extractions_left: number of extractions to come, this one included, at least 1.
    """
    free = d - used
    if capacity is None or free == 0:
        return free
    if "total" in capacity:
        left = round(capacity["total"] * d) - used
        return min(free, max(0, round(left / extractions_left), int(left > 0)))
    return min(free, max(1, round(capacity["per_task"] * free)))
