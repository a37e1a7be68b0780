"""Checks of a class's options that name key, value and what would be valid, when it is built from Python, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from cfl.runtime.errors import ConfigError

MOST = 2**32 - 1
"""The largest integer of any option, which is the largest seed."""
MOST_AT_ONCE = 10**6
"""The largest width of a layer, and number of samples that a client stores or generates or of steps within a round."""
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Between these are the magnitudes of numbers in float32, in which networks compute, beside 0."""


def check_integers(
    section: str, at_least: int, *, at_most: int | None = None, or_null: bool = False, **options: int | None
) -> None:
    """Refuse integers below a bound, or above another.

    Args:
        section: the key that the options stand below, e.g. ``methods.gpm``.
        at_least: the smallest valid one.
        at_most: the largest valid one; None for :data:`MOST`.
        or_null: whether None is valid, too.
        options: values by the options' names.

    Raises:
        ConfigError: for the first option that is refused.
    """
    if at_most is not None:
        valid = f"an integer from {at_least} to {at_most}"
        _check(section, valid, lambda value: at_least <= value <= at_most, or_null, options)
        return
    _check(section, f"an integer of at least {at_least}", lambda value: value >= at_least, or_null, options)


def check_numbers(section: str, interval: str, *, or_null: bool = False, **options: float | None) -> None:
    """As :func:`check_integers`, for numbers outside an interval, e.g. ``(0, 1]`` or ``[0, inf)``; NaN is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    valid = f"a number in {interval}"
    if math.isinf(high):
        valid = f"a number {'of at least' if interval[0] == '[' else 'above'} {low:g}"
    ends = {end for end, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]"}
    _check(section, valid, lambda value: low < value < high or value in ends, or_null, options)


def check_magnitude(key: str, value: float) -> None:
    """Refuse a number that is out of all proportion: NaN, one that float32 cannot hold, or an integer above 2^32 - 1.

    Infinity passes: for some options it means that there is no limit.

    Raises:
        ConfigError: for such a number.
    """
    if isinstance(value, int):
        if abs(value) > MOST:
            raise ConfigError(key, value, f"an integer of at most {MOST}")
    elif math.isnan(value):
        raise ConfigError(key, value, "a number")
    elif value and not math.isinf(value) and not SMALLEST <= abs(value) <= LARGEST:
        raise ConfigError(key, value, f"a number, 0 or of a magnitude from {SMALLEST:.2g} to {LARGEST:.2g} (float32)")


def check_choices(section: str, choices: Collection[Any], *, or_null: bool = False, **options: Any) -> None:
    """As :func:`check_integers`, for values that are none of the choices."""
    *most, last = map(str, choices)
    _check(section, f"{', '.join(most)} or {last}", lambda value: value in choices, or_null, options)


def _check(section: str, valid: str, holds: Callable[[Any], bool], or_null: bool, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if not (or_null if value is None else holds(value)):
            raise ConfigError(f"{section}.{name}", value, valid + ", or null" * or_null)
        if isinstance(value, int | float):
            check_magnitude(f"{section}.{name}", value)
