"""One launcher of ``cfl`` processes for all tests, because it takes seconds to import the program."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cfl.running.launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher({**os.environ, "OMP_NUM_THREADS": "1"})
    yield launcher
    launcher.close()
