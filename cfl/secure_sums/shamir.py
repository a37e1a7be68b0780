"""Shamir's secret sharing over a prime field (Shamir, 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 - 189
"""The largest prime below 2^256. Secrets are below it."""


def split(secret: int, places: Sequence[int], needed: int) -> list[int]:
    """Split a secret into shares, of which ``needed`` recover it and fewer reveal nothing.

    Args:
        secret: from 0 to :data:`PRIME` - 1.
        places: where the random polynomial is evaluated, one share each: different numbers from 1 to :data:`PRIME` - 1.
        needed: from 1 to the number of places.

    Raises:
        ValueError: for other arguments.
    """
    if not 0 <= secret < PRIME or not 1 <= needed <= len(places):
        raise ValueError(f"{needed} of {len(places)} shares of a secret of {secret.bit_length()} bits")
    if len(set(places)) < len(places) or not all(0 < place < PRIME for place in places):
        raise ValueError("places are different numbers above 0")
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(needed - 1))]
    return [_value(coefficients, place) for place in places]


def _value(coefficients: Sequence[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total


def recover(shares: Mapping[int, int]) -> int:
    """Recover the secret from as many shares as are needed, place -> share. Fewer shares give a wrong number."""
    places = tuple(sorted(shares))
    return sum(factor * shares[place] for factor, place in zip(_factors(places), places, strict=True)) % PRIME


@lru_cache(maxsize=64)
def _factors(places: tuple[int, ...]) -> tuple[int, ...]:
    """Factors of the shares at these places in the secret (Lagrange's polynomials at 0)."""
    found = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
