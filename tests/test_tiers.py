"""Tests get their tiers from ``tests/tiers.txt``, which is written from measured times."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import tiers


def test_every_test_that_has_a_tier_is_there() -> None:
    known = tiers.read()
    assert set(known.values()) == set(tiers.TIERS)
    for test in known:
        assert tiers.is_there(test), f"{test}: write {tiers.FILE.name} anew"


class Item:
    """A test as pytest has collected it."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid, self.marks = nodeid, list[str]()

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


@pytest.mark.parametrize(
    ("nodeid", "marks"),
    [
        ("tests/a.py::test_one", ["slow"]),
        ("tests/a.py::test_one[x-y::z]", ["slow"]),
        ("tests/a.py::Kind::test_two[0]", ["medium"]),
        ("tests/a.py::test_three", []),
        ("tests/b.py::test_one", []),
    ],
)
def test_tests_are_marked_as_the_file_says(
    nodeid: str, marks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(tiers, "FILE", tmp_path / "tiers.txt")
    tiers.FILE.write_text("# Tier and test.\nslow tests/a.py::test_one\nmedium tests/a.py::test_two\n")
    here = str(Path(__file__).with_name("conftest.py"))
    conftest: Any = request.config.pluginmanager.get_plugin(here)
    conftest.pytest_collection_modifyitems([item := Item(nodeid)])
    assert item.marks == marks


def test_the_longest_go_first_until_the_rest_is_short_enough() -> None:
    times = Counter({f"tests/a.py::test_{n}": float(2**n) for n in range(10)})
    found = tiers.tiers(times)
    slow = [test for test, tier in found.items() if tier == "slow"]
    left = sum(taken for test, taken in times.items() if test not in slow)
    assert left <= tiers.SHARES["slow"] * sum(times.values())
    assert slow == [test for test, _ in times.most_common(len(slow))]
    assert left + times[slow[-1]] > tiers.SHARES["slow"] * sum(times.values())
    medium = [test for test, tier in found.items() if tier == "medium"]
    fast = left - sum(times[test] for test in medium)
    assert slow + medium == [test for test, _ in times.most_common(len(found))]
    assert fast <= tiers.SHARES["medium"] * sum(times.values()) < fast + times[medium[-1]]


def test_times_are_read_from_what_pytest_prints() -> None:
    lines = ["0.50s call     tests/a.py::test_one[x]", "0.25s setup    tests/a.py::test_one[y]"]
    log = "\n".join([*lines, "1.00s call  tests/b.py::test_two", ""])
    assert tiers.seconds(log) == {"tests/a.py::test_one": 0.75, "tests/b.py::test_two": 1.0}
