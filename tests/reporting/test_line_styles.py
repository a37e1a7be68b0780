"""Colours, dashes and markers: each method has one style everywhere, also distinct for colour-blind readers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from cfl.reporting.line_styles import COLOURS, DASHES, MARKERS, line_styles
from cfl.reporting.method_names import PRINTED

ASSETS = Path(__file__).parents[2] / "cfl" / "reporting" / "compare" / "assets"
ALL = list(dict.fromkeys(PRINTED.values()))

# Matrices on linear RGB that show colours as readers without one kind of cones see them (Machado et al., 2009).
BLIND = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour: str, kind: str) -> np.ndarray:
    """CIE L*a*b* of a colour as readers of a kind see it."""
    c = np.array(to_rgb(colour))
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(BLIND[kind]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.asarray(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    fx, fy, fz = (t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def css() -> str:
    return (ASSETS / "page.css").read_text()


@pytest.mark.parametrize("kind", list(BLIND))
def test_colours_are_told_apart(kind: str) -> None:
    light, dark = (re.findall(r"--c\d: (#[0-9a-f]{6})", part) for part in css().split("@media")[:2])
    for colours, least in ((COLOURS, 20), (light, 20), (dark, 10)):
        seen = [lab(colour, kind) for colour in colours]
        assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > least


def test_colours_are_seen_on_white() -> None:
    for colour in COLOURS:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        assert 1.05 / (float(np.dot([0.2126, 0.7152, 0.0722], linear)) + 0.05) >= 2.5


def test_no_two_methods_look_alike() -> None:
    styles = line_styles({name: name for name in ALL})
    assert len({(style.colour, style.dash) for style in styles.values()}) == len(ALL) > 20
    assert len({(style.colour, style.marker) for style in styles.values()}) == len(ALL)
    first = [line_styles({name: name})[name] for name in ALL[:8]]
    assert {style.colour for style in first} == set(range(8)), "the most frequent ones in colours of their own"


def test_a_method_looks_the_same_in_any_company() -> None:
    others = {"A": "somebody's", "FedAvg": "fedavg", "Z (x 1)": "fot|er", "GPM": "gpm"}
    for spelling in ("Fed-A-GEM", "fed_agem", "FedAGEM"):
        alone = line_styles({"row": spelling})["row"]
        assert alone == line_styles({"Fed-A-GEM": "fed_agem"})["Fed-A-GEM"]
        assert (
            alone == line_styles({**others, "row": spelling})["row"] == line_styles({"row": spelling, **others})["row"]
        )
    mine = line_styles({"MAS": "mas"})["MAS"]
    assert line_styles({name: name for name in [*ALL, "MAS"]})["MAS"] == mine


def test_lines_of_one_method_have_colours_of_their_own() -> None:
    lines = {f"FOT (threshold 0.{k})": "fot" for k in range(1, 7)}
    styles = line_styles({**lines, "FedAvg": "fedavg"})
    assert styles["FOT (threshold 0.1)"] == line_styles({"FOT": "fot"})["FOT"]
    assert styles["FedAvg"] == line_styles({"FedAvg": "fedavg"})["FedAvg"]
    assert len({style.colour for style in styles.values()}) == 7
    many = line_styles({f"FOT {k}": "fot" for k in range(200)})
    assert len(set(many.values())) == 200
    assert len(line_styles({f"FOT {k}": "fot" for k in range(300)})) == 300


def test_the_page_draws_with_the_same_looks() -> None:
    program, light = (ASSETS / "page.js").read_text(), css().partition("@media")[0]
    assert tuple(re.findall(r"--c\d: (#[0-9a-f]{6})", light)) == COLOURS
    for name, values in (("DASHES", DASHES), ("SYMBOLS", MARKERS)):
        found = re.search(rf"const {name} = \[(.*?)\];", program)
        assert found is not None
        assert tuple(re.findall(r'"([\w-]+)"', found[1])) == values
