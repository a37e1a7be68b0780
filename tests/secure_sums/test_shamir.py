"""Secret sharing: any sufficient number of shares recovers the secret, and fewer shares fit every secret."""

from __future__ import annotations

from itertools import combinations

import pytest
from sympy import isprime, prevprime

from cfl.secure_sums.shamir import PRIME, recover, split


def test_the_field_is_prime() -> None:
    assert isprime(PRIME)
    assert prevprime(2**256) == PRIME


@pytest.mark.parametrize("secret", [0, 1, 2**255 - 1, PRIME - 1])
def test_all_subsets_that_suffice_recover_it(secret: int) -> None:
    places = [1, 2, 7, 500, 10**6]
    for needed in range(1, 6):
        shares = dict(zip(places, split(secret, places, needed), strict=True))
        for chosen in combinations(places, needed):
            assert recover({place: shares[place] for place in chosen}) == secret
        assert recover(shares) == secret  # from more shares than needed


def test_one_share_too_few_fits_every_secret() -> None:
    """For each secret, a polynomial through the known shares has it as its value at 0."""
    places = [1, 2, 3]
    known = dict(zip(places, split(42, places, 3), strict=True))
    del known[3]
    for secret in (0, 41, PRIME - 1):
        # Lagrange through (0, secret) and the known shares, by hand, at 3: 1 s - 3 y1 + 3 y2.
        completed = {**known, 3: (secret - 3 * known[1] + 3 * known[2]) % PRIME}
        assert recover(completed) == secret


def test_shares_differ_between_splits() -> None:
    assert split(7, [1, 2], 2) != split(7, [1, 2], 2)


@pytest.mark.parametrize(
    ("secret", "places", "needed"),
    [(PRIME, [1, 2], 2), (-1, [1, 2], 2), (1, [1, 2], 3), (1, [1, 2], 0), (1, [0, 1], 2), (1, [1, 1], 2)],
)
def test_what_cannot_be_shared_is_refused(secret: int, places: list[int], needed: int) -> None:
    with pytest.raises(ValueError, match=r"shares|places"):
        split(secret, places, needed)
