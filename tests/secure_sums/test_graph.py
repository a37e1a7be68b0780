"""Neighbours: as many for each client, mutual, connected, and drawn at random."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from cfl.secure_sums.graph import neighbours_of, shares_needed

CLIENTS = [3, 5, 8, 13, 21, 34, 55, 89, 144]


def drawn(degree: int | None, seed: int = 0) -> dict[int, list[int]]:
    return neighbours_of(CLIENTS, degree, np.random.default_rng(seed))


@pytest.mark.parametrize("degree", [2, 4, 6, 8, 10, None])
def test_each_has_as_many_neighbours_and_is_theirs(degree: int | None) -> None:
    found = drawn(degree)
    assert set(found) == set(CLIENTS)
    for client, near in found.items():
        assert len(set(near)) == len(near) == min(degree or 8, 8)
        assert client not in near
        assert all(client in found[other] for other in near)


def test_a_circle_connects_all() -> None:
    found = drawn(2)
    reached, edge = {3}, [3]
    while edge:
        edge = [other for other in found[edge.pop()] if other not in reached] + edge
        reached.update(edge)
    assert reached == set(CLIENTS)


def test_the_circle_is_drawn() -> None:
    assert drawn(2) == drawn(2)
    assert drawn(2) != drawn(2, seed=1)


@pytest.mark.parametrize(("share", "neighbours"), [("0.57", 99), ("0.58", 49), ("0.6", 9), ("0.999", 9)])
def test_more_than_the_share_is_needed(share: str, neighbours: int) -> None:
    needed = shares_needed(float(share), neighbours)
    assert needed - 1 <= Fraction(share) * (neighbours + 1) < needed


@pytest.mark.parametrize("neighbours", [1, 2, 3, 8, 63])
def test_half_of_the_holders_are_never_enough(neighbours: int) -> None:
    needed = shares_needed(0.5, neighbours)
    assert 2 * needed > neighbours + 1
    assert 2 * (needed - 1) <= neighbours + 1
