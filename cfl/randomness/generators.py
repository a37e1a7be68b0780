"""Counted randomness: every draw comes from a generator named by (seed, purpose, indices).

No draw depends on how many draws happened before it, so resuming, cohort width, number of processes
and order of evaluation never change a result.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_for(seed: int, purpose: str, *indices: int) -> int:
    """63-bit seed for one purpose, e.g. ``seed_for(0, "shuffle", round, client, epoch)``.

    Args:
        seed: the run's seed.
        purpose: what the draw is for; different purposes give independent streams.
        indices: task, round, client, ... whatever identifies the draw.
    """
    name = "/".join([str(int(seed)), purpose, *(str(int(i)) for i in indices)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """NumPy generator for permutations, partitions and sampling; see :func:`seed_for`."""
    return np.random.Generator(np.random.PCG64(seed_for(seed, purpose, *indices)))


def torch_generator(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Torch generator on ``device`` for large tensors (sketches, noise); see :func:`seed_for`."""
    return torch.Generator(device).manual_seed(seed_for(seed, purpose, *indices))


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators that a network on ``device`` draws from where it says no more than ``torch.rand()``.

    ``torch.manual_seed`` would also note for every other kind of device where it was called from, each time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
