"""Random words are those of SplitMix64, at any place and beside any other keys."""

from __future__ import annotations

import pytest
import torch

from cfl.randomness import counter_bits
from cfl.randomness.counter_bits import random_words, random_words_at


def splitmix64(key: int, count: int) -> list[int]:
    """The first words of SplitMix64 (Steele, Lea, Flood, 2014), in Python's integers."""
    words, mask = [], (1 << 64) - 1
    for j in range(1, count + 1):
        z = (key + j * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words.append(z ^ (z >> 31))
    return words


@pytest.mark.parametrize("key", [0, 1, 2**62 + 12345, 2**63 - 1, -5])
def test_words_are_splitmix64(key: int) -> None:
    found = [word % 2**64 for word in random_words(torch.tensor([3, key]), 20)[1].tolist()]
    assert found == splitmix64(key % 2**64, 20)


def test_published_words() -> None:
    """The first words from seed 1234567 are the published ones."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [word % 2**64 for word in random_words(torch.tensor([1234567]), 5)[0].tolist()] == expected


@pytest.mark.parametrize("key", [0, 1, 2**62 + 12345, 2**63 - 1, -5])
def test_words_at_places_are_those_in_a_row(key: int) -> None:
    places = torch.tensor([[7, 0, 3], [7, 19, 1]])
    expected = torch.tensor([[random_words(torch.tensor([key]), 20)[0, j] for j in row] for row in places.tolist()])
    assert torch.equal(random_words_at(key, places), expected)
    assert torch.equal(random_words_at(key, places.T), expected.T)
    assert places.tolist() == [[7, 0, 3], [7, 19, 1]]


def test_words_at_far_places() -> None:
    """Words at far places are right: the product of place and step wraps around modulo 2^64."""
    place, step, mask = 10**12, 0x9E3779B97F4A7C15, (1 << 64) - 1
    expected = splitmix64((5 + place * step) & mask, 1)
    assert [word % 2**64 for word in random_words_at(5, torch.tensor([place])).tolist()] == expected


def test_threads_may_empty_the_cache_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout masks are drawn in several threads."""

    class Emptied(dict):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    monkeypatch.setattr(counter_bits, "_counters", Emptied())
    random_words(torch.tensor([3]), 20)
    assert [word % 2**64 for word in random_words(torch.tensor([3]), 20)[0].tolist()] == splitmix64(3, 20)
