"""Fixtures that more than one test folder uses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Shells ignore SIGINT for jobs in the background, and nohup ignores SIGHUP. Processes that tests start inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
os.environ["CFL_CACHE"] = "off"  # tests neither use earlier measurements of engines nor change the user's cache

import cfl  # noqa: E402, F401  before any test imports lightning: see cfl/runtime/torchvision_ops.py

pytest.register_assert_rewrite("support")  # failures of shared checks show the values


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets, from CFL_DATA_ROOT."""
    named = os.environ.get("CFL_DATA_ROOT")
    if not named:
        pytest.skip("needs real data: set CFL_DATA_ROOT to a folder with data sets in torchvision's layout")
    if not Path(named).is_dir():
        pytest.skip(f"needs real data: CFL_DATA_ROOT names {named}, which is no folder")
    return Path(named)


@pytest.fixture(scope="module")
def crew() -> Iterator[Any]:
    """Two connected processes, for all tests of a module."""
    from cfl.testing.processes import Crew

    crew = Crew(2)
    yield crew
    crew.close()


@pytest.fixture
def unhurried_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a probe of engines try all candidates, however busy the machine is."""
    for limit in ("LEAST_SECONDS", "MOST_SECONDS", "MOST_OF_RUN"):
        monkeypatch.setattr(f"cfl.engines.probe.{limit}", float("inf"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with their tiers (tests/support/tiers.py)."""
    from support import tiers

    tier_of = tiers.read()
    for item in items:
        name, _, function = item.nodeid.partition("::")
        tier = tier_of.get(f"{name}::{function.partition('[')[0].rpartition('::')[2]}")
        if tier is not None:
            item.add_marker(tier)
