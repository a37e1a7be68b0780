"""Runs in several processes, and a method that makes a client fail."""

from __future__ import annotations

from collections.abc import Sequence

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
    "environment",
    "free_port",
    "several",
]


class Poison(Method):
    """Puts NaN into the parameters that one client sends in round 1."""

    def __init__(self, client: int) -> None:
        self.client = client

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        for position in positions:
            if cohort.round == 1 and cohort.clients[position] == self.client:
                cohort.parameters["head.bias"].data[position] = torch.nan
