"""Expressions over a run's figures."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cfl.papers.expressions import Undefined, check, evaluate

NAMES: dict[str, Any] = {
    "acc": 80.0,
    "none": None,
    "zero": 0,
    "text": "fot",
    "yes": True,
    "nan": math.nan,
    "matrix": [[1.0, 2.0], [3.0, 4.0]],
    "mean": lambda values: sum(values) / len(values),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("acc", 80.0),
        ("acc - 2 * 3", 74.0),
        ("-(acc / 4)", -20.0),
        ("matrix[-1, 0]", 3.0),
        ("matrix[1]", [3.0, 4.0]),
        ("mean(matrix[0])", 1.5),
    ],
)
def test_values(text: str, value: Any) -> None:
    check(text)
    assert evaluate(text, NAMES) == value


@pytest.mark.parametrize(
    "text", ["none", "absent", "acc / zero", "matrix[2, 0]", "acc[0]", "text + 1", "yes + 1", "nan", "matrix + 1"]
)
def test_what_a_run_does_not_have_is_undefined(text: str) -> None:
    check(text)
    with pytest.raises(Undefined):
        evaluate(text, NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "acc if acc else 1",
        "acc ** 2",
        "[a for a in matrix]",
        "(lambda: 1)()",
        "a =",
        "mean(values=matrix)",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        check(text)
    with pytest.raises(SyntaxError):
        evaluate(text, NAMES)


def test_only_named_functions_are_called() -> None:
    with pytest.raises(SyntaxError):
        evaluate("open('x')", NAMES)
