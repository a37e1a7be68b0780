"""Comparison by order: rank correlation, which method leads, and the gap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.paper_tables import fot, tables_of

from cfl.papers.cells import Cell
from cfl.papers.definition import Order
from cfl.papers.orders import OrderComparison, compare_orders, rank_correlation
from cfl.papers.report import markdown
from cfl.runtime.errors import ConfigError


def test_rank_correlation_is_pearsons_of_the_ranks() -> None:
    """The rank correlation equals numpy's Pearson correlation of ranks that are counted differently, also with ties."""
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
    # Our ranks are 1 2 4 3. The paper's 85.68 88.61 88.27 90.35 have ranks 1 3 2 4.
    # Spearman's coefficient is 1 - 6 sum d^2 / (n (n^2 - 1)).
    assert found.correlation == pytest.approx(1 - 6 * (0 + 1 + 4 + 1) / (4 * 15))


@pytest.mark.parametrize(("sign", "lowest"), [(1, False), (-1, True)])
def test_a_leader_is_better_than_every_other(sign: int, lowest: bool) -> None:
    for ours, leads in ((3.0, True), (2.0, False), (1.5, False)):
        means = {"a": sign * ours, "b": sign * 1.0, "c": sign * 2.0}
        order = Order("method", ["ACC"], "a", "b", ["ACC"] if lowest else [])
        assert OrderComparison({}, "ACC", list(means), means, means, order).leads is leads


def with_seeds(values: dict[str, dict[int, float]], without: dict[str, dict[int, str]] | None = None) -> list[Cell]:
    lacking = without or {}
    return [
        replace(cell, seeds=values.get(cell.point["method"], {}), without=lacking.get(cell.point["method"], {}))
        for cell in cells({})
    ]


def test_methods_are_compared_over_the_seeds_that_all_have() -> None:
    (found,) = compare_orders(
        fot()["table1"], with_seeds({"fedavg": {0: 60.0, 1: 80.0, 2: 80.0}, "fot": {0: 62.0, 2: 90.0}, "er": {2: 85.0}})
    )
    assert found.ours == {"fedavg": 80.0, "fot": 90.0, "er": 85.0}
    assert found.seeds == 1
    (found,) = compare_orders(fot()["table1"], with_seeds({"fedavg": {0: 60.0, 1: 80.0}, "fot": {2: 62.0}}))
    assert (found.ours, found.seeds) == ({"fedavg": 70.0, "fot": 62.0}, None)
    text = markdown(fot()["table1"], "short", with_seeds({"fedavg": {0: 60.0, 1: 80.0}, "fot": {2: 62.0}}))
    assert "| FL, FOT | differ | - | no | yes |" in text


def test_what_lacks_a_value_in_some_seed_is_not_compared() -> None:
    values = {"fedavg": {0: 60.0}, "er": {0: 70.0}, "fot": {0: 62.0}}
    (found,) = compare_orders(fot()["table1"], with_seeds(values, {"er": {1: "never within 100 rounds"}}))
    assert found.values == ["fedavg", "fot"]


def test_bounds_are_left_out_and_another_tables_numbers_may_be_compared_with() -> None:
    """Bounds have no place in an order, and FedWeIT's table1-present is compared with the numbers of Table 1."""
    present, published = (tables_of("fedweit")[name] for name in ("table1-present", "table1"))
    ours = {"stl": 90.0, "fedprox": 50.0, "scaffold": 30.0, "fedweit": 80.0}
    made = [
        Cell(present, point, "accuracy", None, {0: ours[point["method"]]} if point["method"] in ours else {})
        for point in present.points("short")
    ]
    (found,) = compare_orders(present, made)
    assert found.values == ["fedprox", "scaffold", "fedweit"]
    assert (found.leads, found.leads_in_paper, found.correlation) == (True, True, pytest.approx(1.0))
    numbers = {
        p.place["method"]: p.mean
        for p in published.published
        if p.figure == "accuracy" and p.place["benchmark"] == "noniid"
    }
    assert found.paper == {name: numbers[name] for name in found.values}
    text = markdown(present, "short", made)
    assert "Left out as bounds: STL." in text
    assert "The paper's are those of its table1, NonIID-50: other data or settings than these." in text


def test_orders_name_values_that_the_axis_has() -> None:
    axes, figures = {"method": ["a", "b"]}, ["ACC"]
    entry = {"axis": "method", "figure": "ACC", "leader": "a", "reference": "b"}
    assert Order.read({**entry, "bounds": ["b"]}, axes, figures, "x").bounds == ("b",)
    for wrong in ({"leader": "c"}, {"reference": "c"}, {"bounds": ["c"]}):
        with pytest.raises(ConfigError, match="one of the axis values a, b"):
            Order.read({**entry, **wrong}, axes, figures, "x")
    with pytest.raises(ConfigError, match="one of table, at"):
        Order.read({**entry, "against": {"place": {}}}, axes, figures, "x")


def test_what_has_not_been_run_is_left_out() -> None:
    assert compare_orders(fot()["table1"], cells({"fot": 58.0})) == []
    (found,) = compare_orders(fot()["table1"], cells({"fot": 58.0, "er": 55.0}))
    assert (found.leads, found.gap, found.correlation) == (True, None, None)
    (found,) = compare_orders(fot()["table1"], cells({"fedavg": 58.0, "er": 55.0}))
    assert (found.leads, found.gap) == (None, None)


def test_a_table_without_an_order_has_none() -> None:
    assert compare_orders(fot()["table3"], []) == []


def fedagem_cells(ours: dict[tuple[str, str, str], dict[str, float]]) -> list[Cell]:
    """Return the cells of Fed-A-GEM's Table 1 with our values; a cell that ``ours`` lacks has none.

    Args:
        ours: (benchmark, method, with) -> figure -> value.
    """
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
    assert "\nOrder along with:\n\n| benchmark | method | figure | run | seeds | rank correlation |" in text
    assert "| R-MNIST | FL | Domain-IL | -, Fed-A-GEM | 1 | - | yes | yes | +11.00 | +11.44 |\n" in text
    assert "| S-CIFAR100 | FL+A-GEM | Class-IL | -, Fed-A-GEM | 1 | - | no | yes | -1.00 | " in text
    head, rule = text.partition("\nOrder along with:\n\n")[2].splitlines()[:2]
    assert head.count("|") == rule.count("|") == 11


def test_a_table_with_one_figure_names_it_above() -> None:
    table = replace(fot()["table1"], order=Order("method", ("ACC",), "fot", "fedavg"))
    text = markdown(table, "short", cells({"fedavg": 50.0, "er": 55.0, "gpm": 60.0, "fot": 58.0}))
    assert text.partition("\nOrder")[2].splitlines()[:5] == [
        " along method, by ACC:",
        "",
        "| benchmark | partition | run | seeds | rank correlation | FOT leads, ours | paper | FOT - FL, ours | paper |",
        "|---|---|---|---:|---:|---|---|---:|---:|",
        "| Permuted MNIST | IID | FL, ER+FL, GPM+FL, FOT | 1 | +0.40 | no | yes | +8.00 | +4.67 |",
    ]
