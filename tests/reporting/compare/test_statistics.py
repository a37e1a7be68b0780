"""Means, paired intervals and ranks equal numbers computed by hand and by scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cfl.metrics.base import Figure
from cfl.reporting.compare.statistics import LEVEL, Difference, Spread, mean_ranks, paired_difference
from cfl.reporting.compare.tables import difference_text


def test_mean_and_sample_deviation_worked_by_hand() -> None:
    # 2, 4, 9: mean 5, squares 9 + 1 + 16 = 26, over n - 1 = 2: 13.
    assert Spread.of([2.0, 4.0, 9.0]) == Spread(5.0, math.sqrt(13.0), 3)
    assert Spread.of([7.5]) == Spread(7.5, None, 1)
    assert Spread.of([]) is None


def test_all_numbers_of_a_cell_are_in_the_unit_of_its_column() -> None:
    megabytes = Figure("uplink_bytes", "uplink MB", "sent", "lower", divisor=1e6)
    assert Spread(3.5e6, 2e5, 3).shown(2, "+,", 1e6) == "+3.50 ± 0.20"
    assert difference_text(Difference(2e6, -1e6, 5e6, 3), megabytes) == "+2.00 [-1.00, +5.00]"


def test_a_paired_interval_worked_by_hand() -> None:
    # Differences 1, 3, 5 on seeds 0, 1, 4: mean 3, deviation 2; Student's t of 2 degrees of
    # freedom has the quantile (2p - 1) / sqrt(2p (1 - p)), 4.30265 at p = 0.975.
    found = paired_difference({0: 11.0, 1: 13.0, 4: 25.0, 7: 99.0}, {4: 20.0, 1: 10.0, 0: 10.0, 8: -5.0})
    assert found is not None
    assert (found.mean, found.count) == (3.0, 3)
    half = 0.95 / math.sqrt(2 * 0.975 * 0.025) * 2 / math.sqrt(3)
    assert (found.low, found.high) == (pytest.approx(3 - half, rel=1e-9), pytest.approx(3 + half, rel=1e-9))


@pytest.mark.parametrize("count", [2, 5, 30])
def test_the_interval_is_scipys(count: int) -> None:
    draw = np.random.default_rng(count)
    ours, theirs = draw.normal(80, 3, count), draw.normal(78, 3, count)
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(theirs)))
    expected = stats.ttest_rel(ours, theirs).confidence_interval(LEVEL)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_without_pairs_there_is_no_interval() -> None:
    assert paired_difference({0: 1.0}, {1: 2.0}) is None
    assert paired_difference({0: 5.0, 1: 1.0}, {0: 2.0}) == Difference(3.0, None, None, 1)
    assert paired_difference({0: 5.0, 1: 4.0}, {0: 2.0, 1: 1.0}) == Difference(3.0, 3.0, 3.0, 2)


def test_ranks_worked_by_hand() -> None:
    rows = [{0: 90.0, 1: 70.0}, {0: 80.0, 1: 80.0, 2: 1.0}, {0: 90.0, 1: 60.0}]
    # Seed 0: 1.5, 3, 1.5; seed 1: 2, 1, 3; seed 2 is not common.
    assert mean_ranks(rows, higher_is_better=True) == [1.75, 2.0, 2.25]
    # Seed 0: 2.5, 1, 2.5; seed 1: 2, 3, 1.
    assert mean_ranks(rows, higher_is_better=False) == [2.25, 2.0, 1.75]
    assert mean_ranks([{0: 1.0}, {1: 1.0}], higher_is_better=True) is None
    assert mean_ranks([], higher_is_better=True) is None


def test_ranks_are_scipys() -> None:
    values = np.random.default_rng(0).integers(0, 4, (6, 5)).astype(float)  # [rows, seeds], many ties
    found = mean_ranks([dict(enumerate(row)) for row in values], higher_is_better=True)
    assert found == pytest.approx(stats.rankdata(-values, axis=0).mean(axis=1))
