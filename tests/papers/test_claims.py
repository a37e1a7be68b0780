"""The page of the papers' claims: its tables follow from the kept runs, its other figures are on the pages it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from cfl.reporting.compare.statistics import Spread

DOCS = Path(__file__).parents[2] / "docs"
ROWS = yaml.safe_load((DOCS / "claims.yaml").read_text())


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    """The module docs/claims.py, which is not part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return import_module("claims")


def test_the_tables_are_what_the_kept_runs_say(claims: ModuleType, tmp_path: Path) -> None:
    known = claims.read_claims()
    page = claims.PAGE.read_text()
    assert claims.written(page, claims.block(known)) == page  # else run python docs/claims.py
    assert claims.draw(known, tmp_path / "claims.png").stat().st_size > 10_000


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["claim"])
def test_the_section_is_there_and_its_page_has_the_figures_in_words(row: dict[str, Any]) -> None:
    name, _, anchor = row["details"].partition("#")
    page = (DOCS / "results" / name).read_text()
    headings = [
        re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()) for line in page.splitlines() if line[:1] == "#"
    ]
    assert anchor in [heading.replace(" ", "-") for heading in headings]
    for figure in re.findall(r"\d+\.\d+", f"{row.get('ours', '')} {row.get('note', '')}"):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page), figure


@dataclass(frozen=True)
class OfCell:
    """A cell with only the attributes that a claim reads."""

    seeds: dict[int, float]
    published: Spread
    definition: Any
    difference: float | None = None
    status: str = ""


@dataclass(frozen=True)
class Tolerance:
    tolerance: float


def cell(published: float, std: float, *ours: float) -> OfCell:
    return OfCell(dict(enumerate(ours)), Spread(published, std, 3), Tolerance(0.5))


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (cell(5, 0.1, 3), cell(1, 0.1, 1.5), "confirmed"),  # 1.5 exceeds 1, the sum of the tolerances
        (cell(5, 0.1, 3), cell(1, 0.1, 2.5), "open"),
        (cell(5, 0.1, 1.5), cell(1, 0.1, 3), "contradicted"),
        (cell(5, 1, 3), cell(1, 1, 1.5), "open"),  # 1.5 is less than 2, the sum of the deviations
        (cell(5, 1, 3, 2.7), cell(1, 1, 1.5, 1.2), "confirmed"),  # the same difference with both seeds
        (cell(5, 1, 3, 1), cell(1, 1, 1.5, 1.2), "open"),  # the differences are 1.5 and -0.2
        (cell(5, 1, 96), cell(1, 1, 96), "contradicted"),
        (cell(5, 1), cell(1, 1, 96), "open"),  # the first cell was not run
    ],
)
def test_verdicts_follow_from_differences(claims: ModuleType, first: OfCell, second: OfCell, verdict: str) -> None:
    of = claims.Claim({"table": "table1", "minus": {}, "scale": "paper"}, [first, second], [first, second])
    assert of.verdict == verdict
