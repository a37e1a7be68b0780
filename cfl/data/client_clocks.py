"""Clients' own clocks: the rounds that each client spends on each task, if clients do not change tasks together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cfl.randomness.generators import numpy_generator


def rounds_of_clients(rounds: Sequence[int], spread: float, num_clients: int, seed: int) -> np.ndarray:
    """``[C, T]`` int64, rounds of client c's t-th task: uniform over the integers within ``r_t (1 -+ spread)``.

    The number of rounds may differ by task and client (asynchronous FedWeIT, Yoon et al., 2021, appendix E; the paper
    does not give the numbers). Keyed by (seed, client).

    Args:
        rounds: r_t, at least 1, of each of the T tasks.
        spread: in [0, 1); 0 gives every client r_t rounds.
        num_clients: C.
        seed: the run's seed.
    """
    least, most = _bounds(rounds, spread)
    drawn = [
        numpy_generator(seed, "clock of client", client).integers(least, most, endpoint=True)
        for client in range(num_clients)
    ]
    return np.stack(drawn)


def can_differ(rounds: Sequence[int], spread: float) -> bool:
    """Whether there is a task on which clients may spend different numbers of rounds.

    Args:
        rounds: r_t, at least 1, of each task.
        spread: as for :func:`rounds_of_clients`.
    """
    return any(few < many for few, many in zip(*_bounds(rounds, spread), strict=True))


def _bounds(rounds: Sequence[int], spread: float) -> tuple[list[int], list[int]]:
    least = [max(1, math.ceil(r * (1 - spread) - 1e-9)) for r in rounds]
    return least, [math.floor(r * (1 + spread) + 1e-9) for r in rounds]
