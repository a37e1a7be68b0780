"""All shown numbers are rounded by one rule, in Python and in the page's JavaScript."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support.made_up import make_run

import cfl
from cfl.reporting.compare.command import main
from cfl.reporting.figures import accuracy_heatmap
from cfl.reporting.method_names import printed
from cfl.reporting.rounding import rounded, significant

PROGRAM = Path(__file__).parents[2] / "cfl" / "reporting" / "compare" / "assets" / "page.js"


@pytest.mark.parametrize(
    ("value", "decimals", "style", "text"),
    [
        (0.125, 2, "", "0.13"),
        (-0.125, 2, "", "-0.13"),
        (0.135, 2, "", "0.14"),  # the float is a little above 0.135
        (1.005, 2, "", "1.01"),  # the float is a little below 1.005
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


# As floats, the second and the third value are a little below the decimals written here.
TIES = {"fedavg": (0.125, "0.13"), "fot": (2.675, "2.68"), "er": (12.345, "12.35")}


def test_a_figure_reads_the_same_in_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for method, (value, text) in TIES.items():
        run = make_run(tmp_path / "runs" / method, method, acc=value, fgt=value)
        assert f"ACC {text}, FGT {text}" in repr(cfl.load(run))
    out = tmp_path / "out"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    terminal = capsys.readouterr().out
    html = (out / "report.html").read_text()
    data = json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    for method, (value, text) in TIES.items():
        name = printed(method, {})
        assert re.search(rf"│ {name} +│ +{text} │ +{text} │", terminal)
        assert f"| {name} | {text} | {text} |" in (out / "comparison.md").read_text()
        assert re.search(rf"^{name} & \$(\\mathbf\{{)?{text}\}}?\$ &", (out / "comparison.tex").read_text(), re.M)
        assert re.search(rf",{name},acc,{value},,1,[\d.]+,{text}\n", (out / "means.csv").read_text())
        assert re.search(rf",{name},{method},.*,{value},{value},", (out / "runs.csv").read_text()), "unrounded"
        (row,) = (row for row in data["tables"][0]["rows"] if data["labels"][row["label"]] == name)
        assert row["figures"]["acc"][0] == value
        figure = accuracy_heatmap(torch.tensor([[value / 10]], dtype=torch.float64), name)
        assert figure.axes[0].texts[0].get_text() == rounded(value / 10, 1)
    if shutil.which("node"):
        assert said_by_the_page([value for value, _ in TIES.values()]) == [f"+{text}" for _, text in TIES.values()]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node.js on this machine")
def test_the_page_rounds_likewise() -> None:
    noise = np.random.default_rng(1).normal(0, 1000, 200).tolist()
    values = [0.125, -0.125, 1.005, 2.675, 0.12499999999999999, -0.001, 0.0, 99.995, 1234567.125, *noise]
    values += [k / 1000 for k in range(0, 3000, 5)]
    assert said_by_the_page(values) == [rounded(value, 2, "+,") for value in values]


def said_by_the_page(values: list[float]) -> list[str]:
    """Return values as the page's JavaScript function writes them, with two decimals and a sign."""
    found = re.search(r"const formats = .*?function rounded\(.*?\n  }", PROGRAM.read_text(encoding="utf-8"), re.S)
    assert found is not None
    asked = f"{found[0]}\nconsole.log(JSON.stringify({json.dumps(values)}.map((value) => rounded(value, 2, true))))"
    said = subprocess.run(["node", "-e", asked], capture_output=True, text=True, check=True).stdout
    return [text.replace("−", "-") for text in json.loads(said)]
