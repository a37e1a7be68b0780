"""Seeding many generators at once, compared with NumPy's own seeding."""

from __future__ import annotations

import numpy as np
import pytest

from cfl.randomness.seed_sequences import numpy_generator_of, pcg64_words

BORDERS = [0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]


def seeds() -> list[int]:
    drawn = np.random.default_rng(0)
    return [*BORDERS, *drawn.integers(0, 2**63, 2000).tolist(), *drawn.integers(0, 2**33, 500).tolist()]


@pytest.mark.filterwarnings("error")
def test_words_are_those_of_a_seed_sequence() -> None:
    expected = [np.random.SeedSequence(seed).generate_state(4, np.uint64) for seed in seeds()]
    assert np.array_equal(pcg64_words(seeds()), expected)


def test_a_seed_alone_gives_what_it_gives_among_others() -> None:
    together = pcg64_words(seeds()[:20])
    assert all(np.array_equal(pcg64_words([seed])[0], words) for seed, words in zip(seeds(), together, strict=False))
    assert pcg64_words([]).shape == (0, 4)


def test_generators_draw_what_numpys_draw() -> None:
    for seed, words in zip(seeds()[:100], pcg64_words(seeds()[:100]), strict=True):
        ours, theirs = numpy_generator_of(words), np.random.Generator(np.random.PCG64(seed))
        assert ours.bit_generator.state == theirs.bit_generator.state
        assert np.array_equal(ours.permutation(50), theirs.permutation(50))
        assert np.array_equal(ours.standard_normal(5), theirs.standard_normal(5))
