"""The Page-Hinkley test against loops over all values seen."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from cfl.methods.components.page_hinkley import PageHinkley


def naive(values: list[float], tolerance: float, threshold: float, window: int, warm_up: int, floor: float) -> list:
    """(statistic, beginning of the rise or None) after each value, each from all values since the last rise."""
    found, start = [], 0
    for now in range(len(values)):
        sums = [(0.0, start)]  # the sum of deviations so far, and the next moment
        for t in range(start + warm_up, now + 1):
            before = values[start:t]
            mean = weighted(before, window)
            rises = [max(0.0, b - a) ** 2 for a, b in pairwise(before)]
            deviation = max(math.sqrt(weighted(rises, window)), floor * abs(values[0]))
            sums.append((sums[-1][0] + (values[t] - mean) / deviation - tolerance, t + 1))
        smallest = min(total for total, _ in sums)
        statistic = sums[-1][0] - smallest
        alarm = statistic > threshold
        since = max(moment for total, moment in sums if total == smallest)
        first = max(since, start + warm_up)
        found.append((statistic, first if alarm else None))
        start = now if alarm else start
    return found


def weighted(values: list[float], window: int) -> float:
    """The mean in which the n-th value has the weight 1/n, and 1/window from the window-th on."""
    shares = [1 / min(n, window) for n in range(1, len(values) + 1)]
    return sum(
        value * share * math.prod(1 - later for later in shares[n + 1 :])
        for n, (value, share) in enumerate(zip(values, shares, strict=True))
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_sum_less_its_smallest_value(seed: int) -> None:
    noise = torch.randn(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    steps = torch.tensor([1.0, 4.0, 2.0, 5.0], dtype=torch.float64).repeat_interleave(15)
    values = (steps + 0.3 * noise).tolist()
    options = (0.5, 3.0, 7, 4, 0.02)
    test, wanted = PageHinkley(*options), naive(values, *options)
    found = [test.observe(value, moment) for moment, value in enumerate(values)]
    assert [since for _, since in found] == [since for _, since in wanted]
    assert sum(since is not None for _, since in found) >= 2
    for (statistic, _), (other, _) in zip(found, wanted, strict=True):
        assert statistic == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_it_goes_on_where_it_was() -> None:
    values = torch.rand(30, generator=torch.Generator().manual_seed(0)).cumsum(0).tolist()
    test, other = (PageHinkley(0.1, 3.0, 5, 2, 0.01) for _ in range(2))
    for moment, value in enumerate(values):
        again = PageHinkley(0.1, 3.0, 5, 2, 0.01)
        again.load_state_dict(test.state_dict())
        test = again
        assert test.observe(value, moment) == other.observe(value, moment)


def test_falls_and_noise_of_the_defaults_size_are_no_rise() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        test = PageHinkley(1.0, 6.0, 10, 5, 0.05)
        for moment in range(100):
            loss = (0.3 + 2 * math.exp(-moment / 10)) * (1 + 0.1 * float(torch.randn(1, generator=generator)))
            assert test.observe(loss, moment)[1] is None
