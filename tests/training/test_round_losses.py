"""The mean of a round's losses so far, which can be read at any time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cfl.training.round_losses import RoundLosses


def test_the_mean_is_that_of_all_finite_losses_so_far() -> None:
    losses = RoundLosses()
    assert math.isnan(losses.mean)
    values = []
    for clients in ((0, 1), (2, 3)):
        losses.open(clients, torch.device("cpu"))
        for step in ([1.0, 2.5], [4.0, math.nan], [math.inf, 8.0]):
            losses.add(torch.tensor(step), cast(Any, SimpleNamespace(padded=False)))
            values += [value for value in step if math.isfinite(value)]
            assert losses.mean == pytest.approx(sum(values) / len(values))
            assert losses.mean == pytest.approx(sum(values) / len(values))  # from the cache
