"""Combinations of settings that take several values, and ranges of seeds, as texts of the command line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import MOST

Values = tuple[tuple[str, Any], ...]
"""One combination: config keys with their values."""
_MOST_SEEDS = 1000
"""A larger number is usually a single seed, which is written as 20250101-20250101."""
_OPENING, _CLOSING = "[{(", "]})"


def combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[Values]:
    """Every combination of a grid's values, the last key's changing fastest.

    Args:
        grid: config key -> its values.
    """
    for values in itertools.product(*grid.values()):
        yield tuple(zip(grid, values, strict=True))


def named(values: Values) -> str:
    """``threshold 0.95`` for ``methods.gpm.threshold``; values as on the command line."""
    return ", ".join(f"{key.rpartition('.')[2]} {_text(value)}" for key, value in values)


def setting(key: str, value: Any) -> str:
    """``--key=value`` for the command line."""
    return f"--{key}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def values_in(text: str) -> list[str]:
    """Split a text at its commas, except those in brackets or quotes, and strip blanks around the parts."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += 0 if quote else (sign in _OPENING) - (sign in _CLOSING)
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def seeds_in(text: str, option: str = "--seeds") -> range:
    """The seeds that a text names: 0, 1 and 2 for ``3``, 3 and 4 for ``3-4``.

    Args:
        text: the value of the option.
        option: its name.

    Raises:
        ConfigError: the text has neither form, or names more than 1000 seeds or one above 2^32 - 1.
    """
    first, dash, last = text.strip().partition("-")
    numbers = [first, last] if dash else [first]
    if all(number.isdecimal() and len(number) <= len(str(MOST)) for number in numbers):
        seeds = range(int(first), int(last) + 1) if dash else range(int(first))
        if seeds and seeds[-1] <= MOST and len(seeds) <= _MOST_SEEDS:
            return seeds
    valid = (
        f"how many, an integer from 1 to {_MOST_SEEDS} (seeds 0 to N - 1), or the first and the last of at most "
        f"{_MOST_SEEDS} seeds up to {MOST}, e.g. 3-4"
    )
    raise ConfigError(option, text, valid)
