"""Comparison by order: rank correlation, who leads, the gap."""

from __future__ import annotations

import numpy as np
import pytest
from fabricated import fot, tables_of

from cfl.papers.cells import Cell
from cfl.papers.orders import compare_orders, rank_correlation
from cfl.papers.report import markdown


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


def fedagem_cells(ours: dict[tuple[str, str, str], dict[str, float]]) -> list[Cell]:
    """Benchmark, method, with -> figure -> our value; every other cell of Fed-A-GEM's Table 1 has none."""
    table = tables_of("fedagem")["table1"]
    numbers = {(*(p.place[axis] for axis in table.axes), p.figure): p for p in table.published}
    found = []
    for point in table.points("short"):
        place = (point["benchmark"], point["method"], point["with"])
        for figure in table.figures_at(point):
            values = ours.get(place, {})
            found.append(Cell(table, point, figure, numbers[*place, figure], {0: values[figure]} if values else {}))
    return found


def test_several_figures_are_compared_each_for_itself() -> None:
    table = tables_of("fedagem")["table1"]
    cells = fedagem_cells(
        {
            ("rmnist", "fl", "without"): {"Domain-IL": 50.0},
            ("rmnist", "fl", "fedagem"): {"Domain-IL": 61.0},
            ("cifar100", "agem", "without"): {"Class-IL": 8.0, "Task-IL": 40.0},
            ("cifar100", "agem", "fedagem"): {"Class-IL": 7.0, "Task-IL": 44.5},
            ("cifar100", "fot", "without"): {"Task-IL, own outputs": 30.0},
            ("cifar100", "fot", "fedagem"): {"Task-IL, own outputs": 30.25},
            ("cifar100", "der", "fedagem"): {"Class-IL": 7.0, "Task-IL": 44.5},  # nothing to compare it with
        }
    )
    found = {(*c.place.values(), c.figure): c for c in compare_orders(table, cells)}
    assert {key: (c.leads, c.gap and c.gap[0]) for key, c in found.items()} == {
        ("rmnist", "fl", "Domain-IL"): (True, 11.0),
        ("cifar100", "agem", "Class-IL"): (False, -1.0),
        ("cifar100", "agem", "Task-IL"): (True, 4.5),
        ("cifar100", "fot", "Task-IL, own outputs"): (True, 0.25),
    }
    # The paper's gap is the same figure's: 79.46 - 68.02 of FL on R-MNIST.
    domain = found["rmnist", "fl", "Domain-IL"]
    assert domain.gap
    assert domain.gap[1] == pytest.approx(79.46 - 68.02)
    text = markdown(table, "short", cells)
    assert "\nOrder along with:\n\n| benchmark | method | figure | run | rank correlation |" in text
    assert "| R-MNIST | FL | Domain-IL | -, Fed-A-GEM | - | yes | yes | +11.00 | +11.44 |\n" in text
    assert "| S-CIFAR100 | FL+A-GEM | Class-IL | -, Fed-A-GEM | - | no | yes | -1.00 | " in text
    head, rule = text.partition("\nOrder along with:\n\n")[2].splitlines()[:2]
    assert head.count("|") == rule.count("|") == 10


def test_a_table_with_one_figure_names_it_above() -> None:
    text = markdown(fot()["table1"], "short", cells({"fedavg": 50.0, "er": 55.0, "gpm": 60.0, "fot": 58.0}))
    assert text.partition("\nOrder")[2].splitlines()[:5] == [
        " along method, by ACC:",
        "",
        "| benchmark | partition | run | rank correlation | FOT leads, ours | paper | FOT - FL, ours | paper |",
        "|---|---|---|---:|---|---|---:|---:|",
        "| Permuted MNIST | IID | FL, ER+FL, GPM+FL, FOT | +0.40 | no | yes | +8.00 | +4.67 |",
    ]
