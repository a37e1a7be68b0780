"""Comparison by order: rank correlation, who leads, the gap."""

from __future__ import annotations

import numpy as np
import pytest
from fabricated import fot

from cfl.papers.cells import Cell
from cfl.papers.orders import compare_orders, rank_correlation


def test_rank_correlation_is_pearsons_of_the_ranks() -> None:
    """Against numpy, with ranks counted another way; ties included."""
    generator = np.random.default_rng(0)
    for size in range(3, 9):
        a, b = generator.integers(0, 6, size), generator.normal(size=size)
        if len(set(a.tolist())) == 1:
            continue

        def ranks(x: np.ndarray) -> np.ndarray:
            return np.array([np.mean([i for i, v in enumerate(sorted(x)) if v == value]) for value in x])

        expected = np.corrcoef(ranks(a), ranks(b))[0, 1]
        assert rank_correlation(a.tolist(), b.tolist()) == pytest.approx(expected, abs=1e-12)


def test_rank_correlation_of_the_same_and_the_opposite_order() -> None:
    assert rank_correlation([1, 5, 9], [0.1, 0.2, 4.0]) == pytest.approx(1.0)
    assert rank_correlation([1, 5, 9], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([2, 2, 2], [3.0, 2.0, 1.0]) is None


def cells(ours: dict[str, float]) -> list[Cell]:
    table = fot()["table1"]
    numbers = {
        p.place["method"]: p
        for p in table.published
        if p.figure == "ACC" and (p.place["benchmark"], p.place["partition"]) == ("pmnist", "iid")
    }
    place = {"benchmark": "pmnist", "partition": "iid", "scale": "short"}
    return [
        Cell(table, {**place, "method": method}, "ACC", numbers[method], {0: ours[method]} if method in ours else {})
        for method in table.axes["method"]
    ]


def test_order_and_gap() -> None:
    (found,) = compare_orders(fot()["table1"], cells({"fedavg": 50.0, "er": 55.0, "gpm": 60.0, "fot": 58.0}))
    assert found.values == ["fedavg", "er", "gpm", "fot"]
    assert found.leads is False
    assert found.leads_in_paper is True
    assert found.gap == (pytest.approx(8.0), pytest.approx(90.35 - 85.68))
    # Ours: 1 2 4 3; the paper's: 85.68 88.61 88.27 90.35, hence 1 3 2 4. Spearman's 1 - 6 sum d^2 / (n (n^2 - 1)).
    assert found.correlation == pytest.approx(1 - 6 * (0 + 1 + 4 + 1) / (4 * 15))


def test_what_has_not_been_run_is_left_out() -> None:
    assert compare_orders(fot()["table1"], cells({"fot": 58.0})) == []
    (found,) = compare_orders(fot()["table1"], cells({"fot": 58.0, "er": 55.0}))
    assert (found.leads, found.gap, found.correlation) == (True, None, None)
    (found,) = compare_orders(fot()["table1"], cells({"fedavg": 58.0, "er": 55.0}))
    assert (found.leads, found.gap) == (None, None)


def test_a_table_without_an_order_has_none() -> None:
    assert compare_orders(fot()["table3"], []) == []
