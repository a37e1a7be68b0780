"""The best of several settings: NaN, missing runs, ties, both directions, and the ends of what was tried."""

from __future__ import annotations

import math
import random

import pytest

from cfl.running.grid import Values
from cfl.running.selection import at_an_end, best_of, mean_of


def settings(count: int) -> list[Values]:
    return [(("lr", str(k)),) for k in range(count)]


@pytest.mark.parametrize("highest", [True, False])
def test_the_best_is_the_first_of_the_best_numbers(highest: bool) -> None:
    """Against a plain loop, over random means with ties and NaN."""
    draws = random.Random(0)
    for _ in range(300):
        means = [draws.choice([math.nan, 1.0, 2.0, 2.0, -3.0]) for _ in range(draws.randint(1, 5))]
        expected: int | None = None
        for k, mean in enumerate(means):
            if mean == mean:  # no NaN
                better = expected is None or (mean > means[expected] if highest else mean < means[expected])
                expected = k if better else expected
        of = settings(len(means))
        found = best_of(list(zip(of, means, strict=True)), highest)
        assert found == (None if expected is None else of[expected])
    assert best_of([(of, 1.0) for of in settings(2)] + [((("lr", "x"),), None)], highest) is None


def test_a_setting_counts_when_all_its_seeds_have_been_run() -> None:
    assert mean_of({10: 1.0}, 2) is None
    assert mean_of({10: 1.0, 11: 2.0}, 2) == 1.5
    assert math.isnan(mean_of({10: 99.0, 11: "diverged"}, 2) or 0.0)


def test_numbers_at_an_end_of_what_was_tried() -> None:
    """Compared as numbers, also those that are texts of the command line; what is no number has no end."""
    tried: list[Values] = [(("a", a), ("b", b), ("c", "1")) for a in ("1e-3", "0.1", "10") for b in ("x", "null")]
    assert at_an_end((("a", "1e-3"), ("b", "x"), ("c", "1")), tried) == (("a", "1e-3"),)
    assert at_an_end((("a", "10"), ("b", "x"), ("c", "1")), tried) == (("a", "10"),)
    assert at_an_end((("a", "0.1"), ("b", "x"), ("c", "1")), tried) == ()
    assert at_an_end((("d", True),), [(("d", True),), (("d", False),)]) == ()
