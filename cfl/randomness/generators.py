"""Counted randomness: every draw comes from a generator keyed by (seed, purpose, indices).

No draw depends on earlier draws, so resuming, cohort width, number of processes and order of evaluation do not
change results.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_for(seed: int, purpose: str, *indices: int) -> int:
    """63-bit seed for one purpose, e.g. ``seed_for(0, "shuffle", round, client, epoch)``.

    Torch's generator on the CPU uses its last 32 bits only: of n streams, n^2 / 2^33 pairs are expected to be equal.

    Args:
        seed: the run's seed.
        purpose: what the draw is for; different purposes give independent streams.
        indices: numbers that identify the draw, such as task, round and client.
    """
    name = "/".join([str(int(seed)), purpose, *(str(int(i)) for i in indices)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """NumPy generator for permutations, partitions and sampling; see :func:`seed_for`."""
    return np.random.Generator(np.random.PCG64(seed_for(seed, purpose, *indices)))


def torch_generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """Torch generator on the CPU for large tensors (sketches, noise); see :func:`seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, *indices))


def seed_device(device: torch.device, seed: int) -> None:
    """Seed torch's default generators for a network on ``device``.

    ``torch.manual_seed`` takes longer, because it also records its caller for every other kind of device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
