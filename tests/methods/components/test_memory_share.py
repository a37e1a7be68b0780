"""How much of a memory joins a step."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from cfl.methods.components.exemplars import memory_share


def joining(held: int, size: int, own: int, batch_size: int | None = None) -> int:
    found = memory_share(torch.ones(1, held).bool(), [size], torch.ones(1, own).bool(), batch_size, [7])
    return 0 if found is None else int(found[1].sum())


@pytest.mark.parametrize("held", [1, 7, 100, 300, 1999])
@pytest.mark.parametrize("size", [1, 33, 125, 600])
def test_a_step_takes_its_share_of_the_memory(held: int, size: int) -> None:
    """Without rounding errors: 300 remembered and 50 of 125 samples are 120, not 121."""
    for own in {1, min(50, size), size}:
        assert joining(held, size, own) == math.ceil(Fraction(held * own, size))


def test_a_number_is_a_number() -> None:
    assert [joining(9, 50, 10, wanted) for wanted in (1, 9, 20)] == [1, 9, 9]
