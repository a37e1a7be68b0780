"""Options out of range are refused with key, value and what would be valid."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "valid"),
    [
        ("(0, 1]", (1e-9, 1), (0, 1.1, -1), "a number in (0, 1]"),
        ("[0, 1)", (0, 0.99), (1, -1e-9), "a number in [0, 1)"),
        ("[0, inf)", (0, 1e30), (-1, math.inf), "a number of at least 0"),
        ("(0, inf)", (1e-30, 5), (0, math.inf), "a number above 0"),
        ("[0, inf]", (0, math.inf), (-math.inf, -1), "a number of at least 0"),
    ],
)
def test_numbers(interval: str, inside: tuple[float, ...], outside: tuple[float, ...], valid: str) -> None:
    for value in inside:
        check_numbers("data", interval, share=value)
    for wrong in (*outside, math.nan, None, str(inside[1])):
        with pytest.raises(ConfigError) as caught:
            check_numbers("data", interval, fine=inside[0], share=wrong)  # type: ignore[arg-type]
        assert str(caught.value) == f"data.share = {wrong!r} cannot work; valid: {valid}"


def test_integers_and_choices() -> None:
    check_integers("a", 1, or_null=True, x=1, y=None)
    check_choices("a", ("b", "c"), or_null=True, x="b", y=None)
    wrong: list[tuple[Any, str]] = [
        (lambda: check_integers("a", 1, x=0), "a.x = 0 cannot work; valid: an integer of at least 1"),
        (
            lambda: check_integers("a", 1, or_null=True, x=0),
            "a.x = 0 cannot work; valid: an integer of at least 1, or null",
        ),
        (lambda: check_integers("a", 1, at_most=3, x=4), "a.x = 4 cannot work; valid: an integer from 1 to 3"),
        (lambda: check_integers("a", 1, x=2.5), "a.x = 2.5 cannot work; valid: an integer of at least 1"),  # type: ignore[arg-type]
        (lambda: check_integers("a", 1, x="2"), "a.x = '2' cannot work; valid: an integer of at least 1"),  # type: ignore[arg-type]
        (
            lambda: check_integers("a", 1, x=2**32),
            "a.x = 4294967296 cannot work; valid: an integer of at most 4294967295",
        ),
        (lambda: check_choices("a", ("b", "c", "d"), x="e"), "a.x = 'e' cannot work; valid: b, c or d"),
        (lambda: check_choices("a", (0, 1), x=2), "a.x = 2 cannot work; valid: 0 or 1"),
    ]
    for check, said in wrong:
        with pytest.raises(ConfigError) as caught:
            check()
        assert str(caught.value) == said
