"""One rule for all numbers that are shown, in Python and in the page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cfl.reporting.rounding import rounded, significant

PROGRAM = Path(__file__).parents[2] / "cfl" / "reporting" / "compare" / "assets" / "page.js"


@pytest.mark.parametrize(
    ("value", "decimals", "style", "text"),
    [
        (0.125, 2, "", "0.13"),
        (-0.125, 2, "", "-0.13"),
        (0.135, 2, "", "0.14"),  # as a float a little above
        (1.005, 2, "", "1.01"),  # and this a little below
        (0.12499999999999999, 2, "", "0.13"),  # a mean with a rounding error
        (0.124999, 2, "", "0.12"),
        (2.5, 0, "", "3"),
        (-0.001, 2, "", "0.00"),
        (-0.001, 2, "+", "+0.00"),
        (0.44, 2, "+", "+0.44"),
        (1234567.125, 2, "+,", "+1,234,567.13"),
        (-1234.5, 0, ",", "-1,235"),
        (1e300, 2, "", f"1{'0' * 300}.00"),
        (math.nan, 2, "", "nan"),
    ],
)
def test_half_away_from_zero(value: float, decimals: int, style: str, text: str) -> None:
    assert rounded(value, decimals, style) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.125, "0.13"), (-0.125, "-0.13"), (0.0, "0"), (12.34, "12"), (0.000012345, "1.2e-05")]
)
def test_two_significant_digits(value: float, text: str) -> None:
    assert significant(value, 2) == text


def test_elsewhere_it_is_pythons_rounding() -> None:
    for value in np.random.default_rng(0).normal(0, 100, 200).tolist():
        assert rounded(value, 2, "+") == f"{value:+.2f}"
        assert significant(value, 3) == f"{value:.3g}"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js on this machine")
def test_the_page_rounds_likewise() -> None:
    found = re.search(r"const formats = .*?function rounded\(.*?\n  }", PROGRAM.read_text(encoding="utf-8"), re.S)
    assert found is not None
    noise = np.random.default_rng(1).normal(0, 1000, 200).tolist()
    values = [0.125, -0.125, 1.005, 2.675, 0.12499999999999999, -0.001, 0.0, 99.995, 1234567.125, *noise]
    values += [k / 1000 for k in range(0, 3000, 5)]
    asked = f"{found[0]}\nconsole.log(JSON.stringify({json.dumps(values)}.map((value) => rounded(value, 2, true))))"
    said = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True).stdout
    assert [text.replace("−", "-") for text in json.loads(said)] == [rounded(value, 2, "+,") for value in values]
