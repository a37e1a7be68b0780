"""The tiers ``slow`` and ``medium`` of tests in ``tests/tiers.txt``, and the program that writes that file.

``PYTHONPATH=tests python -m support.tiers LOG`` writes the file anew from what ``pytest --durations=0 -n 2`` printed. A
test is named by file and function; all its parameters have the same tier.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tiers.txt"
TIERS = ("slow", "medium")
"""``make test`` leaves out slow tests, ``make test-fast`` medium ones as well."""
SHARES = {"slow": 0.23, "medium": 0.008}
"""Tier -> the greatest share of the suite's time that the tests may take which remain when it is left out."""
_LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+?\.py::\w+)")


def read() -> dict[str, str]:
    """``tests/file.py::function`` -> tier."""
    words = (line.split() for line in FILE.read_text().splitlines() if line and not line.startswith("#"))
    return {test: tier for tier, test in words}


def seconds(log: str) -> Counter[str]:
    """``tests/file.py::function`` -> seconds of all its cases."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        match = _LINE.match(line)
        if match:
            found[match[2]] += float(match[1])
    return found


def tiers(times: Counter[str]) -> dict[str, str]:
    """Assign tests to tiers: the longest are slow until the rest takes no more than its share, the next are medium."""
    left = total = sum(times.values())
    found = {}
    for test, taken in times.most_common():
        tier = next((tier for tier in TIERS if left > SHARES[tier] * total), None)
        if tier is None:
            break
        found[test] = tier
        left -= taken
    return found


def is_there(test: str) -> bool:
    """Whether a file still has the function."""
    file, _, function = test.partition("::")
    path = FILE.parents[1] / file
    return path.is_file() and f"def {function}(" in path.read_text()


def main(log: str) -> None:
    """Write the file from pytest's output in ``log``, without tests that no longer exist."""
    times = seconds(Path(log).read_text(errors="replace"))
    found = tiers(Counter({test: taken for test, taken in times.items() if is_there(test)}))
    head = "# Tier and test, written by python -m support.tiers from measured times.\n"
    FILE.write_text(head + "".join(f"{found[test]} {test}\n" for test in sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1])
