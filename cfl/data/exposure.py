"""What clients train on while a task is the current one: it alone, others too, or whatever their own clocks say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cfl.errors import ConfigError
from cfl.randomness import numpy_generator

Exposure = Literal["sequential", "cumulative", "joint", "asynchronous"]
EXPOSURES: tuple[Exposure, ...] = ("sequential", "cumulative", "joint", "asynchronous")


class Places:
    """Numbers for the samples of several training sets, one set behind the other.

    Args:
        sizes: number of samples of each task.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def of(self, task: int, index: np.ndarray) -> np.ndarray:
        """Indices into a task's training set to places."""
        return index + self.starts[task]

    def tasks(self, places: Tensor) -> Tensor:
        """``[...]`` int64 places to the tasks that they belong to."""
        ends = torch.from_numpy(self.starts[1:]).to(places.device)
        return torch.searchsorted(ends, places.contiguous(), right=True)

    def split(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """``[...]`` int64 places to tasks and indices into their training sets."""
        tasks = self.tasks(places)
        return tasks, places - torch.from_numpy(self.starts).to(places.device)[tasks]


def exposed(
    task: int, exposure: Exposure, indices: Sequence[Mapping[int, np.ndarray]], places: Places
) -> dict[int, np.ndarray]:
    """Client -> ascending places of what it trains on while ``task`` is the current one.

    Args:
        task: from 0.
        exposure: ``cumulative`` or ``joint``.
        indices: per task, client -> indices into the task's training set.
        places: numbers the samples.
    """
    seen = range(task + 1) if exposure == "cumulative" else range(len(indices))
    return {
        client: np.concatenate([places.of(t, indices[t][client]) for t in seen if client in indices[t]])
        for client in indices[task]
    }


def portions(
    indices: Sequence[Mapping[int, np.ndarray]], places: Places, seed: int, size: int | None
) -> list[dict[int, np.ndarray]]:
    """Every client goes through its samples at its own pace: per period, client -> ascending places it trains on.

    A client has its samples in the order of the tasks, within a task in random order, keyed by (seed, task, client);
    there are as many periods as tasks. So at any time clients may be at different tasks, and one may be between two.

    Args:
        indices: per task, client -> indices into the task's training set; every client in every task.
        places: numbers the samples.
        seed: the run's seed.
        size: samples per client and period, the first ones of each client; None cuts each client's samples into equal
            parts.

    Raises:
        ConfigError: a client does not hold every task, or has too few samples.
    """
    periods = len(indices)
    found: list[dict[int, np.ndarray]] = [{} for _ in range(periods)]
    for client in sorted({client for held in indices for client in held}):
        if any(client not in held for held in indices):
            raise ConfigError("data.exposure", "asynchronous", "a participation in which every client holds every task")
        parts = []
        for task, held in enumerate(indices):
            generator = numpy_generator(seed, "clock", task, client)
            parts.append(places.of(task, generator.permutation(held[client])))
        own = np.concatenate(parts)
        needed = periods * (size or 1)
        if len(own) < needed:
            raise ConfigError(
                "data.portion", size, f"at most {len(own) // periods}: client {client} has {len(own)} samples in all"
            )
        cut = np.array_split(own, periods) if size is None else np.split(own[:needed], periods)
        for period, part in enumerate(cut):
            found[period][client] = np.sort(part)
    return found
