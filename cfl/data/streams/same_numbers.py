"""Refuses data sets that number the same classes, or the same columns, differently."""

from __future__ import annotations

from itertools import combinations

from cfl.data.sources.base import Source
from cfl.runtime.errors import ConfigError


def number_of_each(names: tuple[str, ...], first: int = 0) -> dict[str, int]:
    """Name -> its number, counted from ``first``."""
    return {name: number for number, name in enumerate(names, first)}


def check_same_numbers(
    what: str, sources: list[Source], numbers: list[dict[str, int]], valid: str, all_common: bool = False
) -> None:
    """Refuse two data sets with common names, but not the same name for each number that both have.

    Args:
        what: what has names, ``class`` or ``column``.
        sources: the data sets.
        numbers: for each data set, name -> number.
        valid: what would be valid.
        all_common: whether to refuse only data sets that have the same names.

    Raises:
        ConfigError: ``data.stream.sources``, naming the first name or number that differs.
    """
    known = list(zip((source.name for source in sources), numbers, strict=True))
    for (first, own), (second, others) in combinations(known, 2):
        if own.keys() != others.keys() if all_common else own.keys().isdisjoint(others):
            continue
        theirs = {number: name for name, number in others.items()}
        for name, number in own.items():
            if others.get(name, number) != number:
                found = f"{name!r} is {what} {number} in {first} and {others[name]} in {second}"
                raise ConfigError("data.stream.sources", found, valid)
        for name, number in own.items():
            if theirs.get(number, name) != name:
                found = f"{what} {number} is {name!r} in {first} and {theirs[number]!r} in {second}"
                raise ConfigError("data.stream.sources", found, valid)
