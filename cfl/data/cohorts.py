"""A round's local training as a sequence of cohort batches: K clients side by side, one step after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl.errors import ConfigError
from cfl.randomness import numpy_generator
from cfl.schedule import RoundPlan, Schedule


@dataclass(frozen=True)
class CohortBatch:
    """One local step of up to K clients.

    A client with fewer samples or steps than its neighbours is padded: its ``mask`` is False there and the index
    repeats a sample of its own, so that padding is always valid data.

    Attributes:
        clients: the K clients' ids.
        sizes: number of training samples of each of the K clients.
        index: ``[K, B]`` int64 into the task's training set.
        mask: ``[K, B]`` bool, False where padded.
        padded: whether any entry of ``mask`` is False.
        task: the task all of these clients train.
        cohort: number of the cohort within the round.
        step: local step, from 0.
        closes: positions (0..K-1) of the clients for which this is the last step.
        last_of_round: whether no batch follows in this round.
        x: ``[K, B, C, H, W]`` network input, filled in on the device.
        y: ``[K, B]`` int64 output index, filled in on the device.
    """

    clients: tuple[int, ...]
    sizes: tuple[int, ...]
    index: Tensor
    mask: Tensor
    padded: bool
    task: int
    cohort: int
    step: int
    closes: tuple[int, ...]
    last_of_round: bool
    x: Tensor | None = None
    y: Tensor | None = None

    @property
    def opens(self) -> bool:
        """Whether this is the cohort's first step."""
        return self.step == 0

    @property
    def task_ids(self) -> Tensor:
        """``[K, B]`` int64 task of every sample."""
        return torch.full(self.index.shape, self.task, device=self.index.device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CohortBatch:
        """The same batch with its index and mask on ``device``."""
        return replace(
            self,
            index=self.index.to(device, non_blocking=non_blocking),
            mask=self.mask.to(device, non_blocking=non_blocking),
        )


def local_steps(size: int, schedule: Schedule) -> int:
    """Optimizer steps of a client with ``size`` samples in one round."""
    per_epoch = size // schedule.batch_size if schedule.drop_last else -(-size // schedule.batch_size)
    return per_epoch * schedule.local_epochs


def deal_cohorts(sizes: Mapping[int, int], schedule: Schedule) -> list[list[int]]:
    """Group clients into cohorts of nearly equal width, alike in size so that little is padded.

    Args:
        sizes: client -> number of samples.
        schedule: gives batch size, local epochs and the greatest width.
    """
    order = sorted(sizes, key=lambda client: (-sizes[client], client))
    count = -(-len(order) // schedule.cohort_width)
    return [part.tolist() for part in np.array_split(np.asarray(order), count)]


class RoundLoader:
    """Iterates over the :class:`CohortBatch` es of one round.

    The order of a client's samples is keyed by (seed, round, client, epoch), hence the same for every cohort width.

    Args:
        plan: the round.
        indices: client -> ``[n]`` indices into the task's training set.
        schedule: local epochs, batch size, width.
        seed: the run's seed.
    """

    def __init__(self, plan: RoundPlan, indices: Mapping[int, np.ndarray], schedule: Schedule, seed: int) -> None:
        self.plan, self.indices, self.schedule, self.seed = plan, indices, schedule, seed
        self.cohorts = deal_cohorts({c: len(indices[c]) for c in plan.clients}, schedule)
        self._length = sum(max(local_steps(len(indices[c]), schedule) for c in group) for group in self.cohorts)

    def __len__(self) -> int:
        return self._length

    def _orders(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's samples in order, cut into steps: index and mask, both ``[S, B]``."""
        own, size = self.indices[client], self.schedule.batch_size
        rows = local_steps(len(own), self.schedule) // self.schedule.local_epochs
        index = np.full((self.schedule.local_epochs, rows * size), own[0], dtype=np.int64)
        used = min(len(own), rows * size)
        for epoch in range(self.schedule.local_epochs):
            generator = numpy_generator(self.seed, "shuffle", self.plan.round, client, epoch)
            index[epoch, :used] = own[generator.permutation(len(own))[:used]]
        mask = np.zeros_like(index, dtype=bool)
        mask[:, :used] = True
        return index.reshape(-1, size), mask.reshape(-1, size)

    def __iter__(self) -> Iterator[CohortBatch]:
        for number, group in enumerate(self.cohorts):
            orders = [self._orders(client) for client in group]
            lengths = [len(index) for index, _ in orders]
            steps, size = max(lengths), self.schedule.batch_size
            index = np.empty((len(group), steps, size), dtype=np.int64)
            mask = np.zeros((len(group), steps, size), dtype=bool)
            for row, (own_index, own_mask) in enumerate(orders):
                index[row] = self.indices[group[row]][0]
                index[row, : len(own_index)], mask[row, : len(own_mask)] = own_index, own_mask
            # The widest batch of a step decides its width: nobody computes columns that all clients pad.
            widths = np.maximum(mask.sum(-1).max(0), 1)
            full = [bool(mask[:, s, : widths[s]].all()) for s in range(steps)]
            index_tensor, mask_tensor = torch.from_numpy(index), torch.from_numpy(mask)
            for step in range(steps):
                width = int(widths[step])
                yield CohortBatch(
                    clients=tuple(group),
                    sizes=tuple(len(self.indices[c]) for c in group),
                    index=index_tensor[:, step, :width],
                    mask=mask_tensor[:, step, :width],
                    padded=not full[step],
                    task=self.plan.task,
                    cohort=number,
                    step=step,
                    closes=tuple(row for row, length in enumerate(lengths) if length == step + 1),
                    last_of_round=number + 1 == len(self.cohorts) and step + 1 == steps,
                )


def check_every_client_trains(indices: list[dict[int, np.ndarray]], schedule: Schedule) -> None:
    """Refuse a partition under which a sampled client would have nothing to do.

    Raises:
        ConfigError: naming the first task and client without a single batch.
    """
    for task, clients in enumerate(indices):
        for client, own in clients.items():
            if local_steps(len(own), schedule) == 0:
                if schedule.drop_last and len(own) > 0:
                    raise ConfigError(
                        "schedule.drop_last",
                        True,
                        f"false, or schedule.batch_size of at most {len(own)}: client {client} has {len(own)} samples "
                        f"of task {task}, which is less than one batch of {schedule.batch_size}",
                    )
                raise ConfigError(
                    "data.partition",
                    f"client {client} has no sample of task {task}",
                    "a partition that gives every client at least one sample",
                )
