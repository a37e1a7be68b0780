"""Several processes at once: comparing what they know, and a method that fails in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cfl.engines.cohort import Cohort
from cfl.methods import Method
from cfl.testing.processes import TIMEOUT, Crew, Failed, arrays, environment, free_port, several

__all__ = [
    "TIMEOUT",
    "Crew",
    "Failed",
    "Poison",
    "arrays",
    "assert_close",
    "environment",
    "free_port",
    "several",
]


def assert_close(found: Any, expected: Any, tolerance: float, place: str = "") -> None:
    """Equality of nested dictionaries and lists, floating point arrays up to ``tolerance``."""
    if isinstance(expected, Mapping):
        assert set(found) == set(expected), place
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert_close(left, right, tolerance, f"{place}/{number}")
    elif isinstance(expected, np.ndarray | float):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=place)
    else:
        assert found == expected, place


class Poison(Method):
    """Breaks what one client sends in round 1."""

    def __init__(self, client: int) -> None:
        self.client = client

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        for position in positions:
            if cohort.round == 1 and cohort.clients[position] == self.client:
                cohort.parameters["head.bias"].data[position] = torch.nan
