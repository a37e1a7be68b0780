"""The tests are divided among three tiers, and each is in one."""

from __future__ import annotations

from collections import Counter

import pytest
from support import tiers


def test_every_test_that_has_a_tier_is_there() -> None:
    known = tiers.read()
    assert set(known.values()) == set(tiers.TIERS)
    for test in known:
        assert tiers.is_there(test), f"{test}: write {tiers.FILE.name} anew"


def test_marks_are_those_of_the_file(request: pytest.FixtureRequest) -> None:
    known = tiers.read()
    for item in request.session.items:
        name = item.nodeid.partition("[")[0]
        file, *_, function = name.split("::")
        tier = known.get(f"{file}::{function}")
        assert tier is None or item.get_closest_marker(tier) is not None, name


def test_the_longest_go_first_until_the_rest_is_short_enough() -> None:
    times = Counter({f"tests/a.py::test_{n}": float(2**n) for n in range(10)})
    found = tiers.tiers(times)
    slow = [test for test, tier in found.items() if tier == "slow"]
    left = sum(taken for test, taken in times.items() if test not in slow)
    assert left <= tiers.SHARES["slow"] * sum(times.values())
    assert slow == [test for test, _ in times.most_common(len(slow))]
    assert left + times[slow[-1]] > tiers.SHARES["slow"] * sum(times.values())


def test_times_are_read_from_what_pytest_prints() -> None:
    lines = ["0.50s call     tests/a.py::test_one[x]", "0.25s setup    tests/a.py::test_one[y]"]
    log = "\n".join([*lines, "1.00s call  tests/b.py::test_two", ""])
    assert tiers.seconds(log) == {"tests/a.py::test_one": 0.75, "tests/b.py::test_two": 1.0}
