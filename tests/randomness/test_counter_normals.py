"""Counter-based random numbers: their distributions, and that they do not depend on the keys drawn beside them."""

from __future__ import annotations

import math

import pytest
import torch

from cfl.randomness.counter_bits import random_words
from cfl.randomness.counter_normals import choices, normals, uniforms


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_numbers_do_not_depend_on_their_company(count: int) -> None:
    options = torch.tensor([3, 5, 9])
    for draw in (uniforms, normals, lambda k, n: choices(k, options, n)):
        alone, together = draw(torch.tensor([12]), count), draw(torch.tensor([5, 12, -7]), 31)
        assert alone.shape == (1, count)
        assert torch.equal(alone[0], together[1, :count])
        assert not torch.equal(together[0], together[1])


def test_normals_are_box_and_mullers_of_the_words() -> None:
    found = normals(torch.tensor([4]), 10)[0].double()
    for pair, word in enumerate(random_words(torch.tensor([4]), 5)[0].tolist()):
        low, high = word % 2**32, (word >> 32) % 2**32
        radius = math.sqrt(-2 * math.log((low + 0.5) / 2**32))
        angle = 2 * math.pi * high / 2**32
        expected = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)
        torch.testing.assert_close(found[2 * pair : 2 * pair + 2], expected, rtol=0, atol=1e-5)


def test_normals_are_normal() -> None:
    """Moments are right within five standard deviations, the distribution function by Kolmogorov and Smirnov's test."""
    x = normals(torch.arange(200), 5001).double().flatten()
    n = len(x)
    assert torch.isfinite(x).all()
    for power, mean, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(float((x**power).mean()) - mean) < 5 * math.sqrt(variance / n)
    ordered = 0.5 * torch.erfc(-x.sort().values / math.sqrt(2))
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert float((ordered - steps).abs().max()) < 1.95 / math.sqrt(n)  # one in a thousand
    pairs = x.view(200, 5001)[:, :5000].reshape(-1, 2)
    assert abs(float(pairs.prod(1).mean())) < 5 / math.sqrt(len(pairs))


def test_choices_are_even() -> None:
    options = torch.tensor([2, 3, 7, 11, 13])
    found = choices(torch.arange(100), options, 1000).flatten()
    counts = torch.stack([(found == option).sum() for option in options]).double()
    assert int(counts.sum()) == len(found)
    expected = len(found) / len(options)
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # chi square of 4 degrees: one in a thousand
    u = uniforms(torch.arange(100), 1000)
    assert 0 < float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) < 1
