"""What clients still have of other tasks: nothing (continual learning), all earlier ones, or everything at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Exposure = Literal["sequential", "cumulative", "joint"]


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
