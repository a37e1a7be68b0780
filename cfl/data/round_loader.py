"""Loads a round: every cohort's local steps, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from cfl.data.cohort_dealing import deal_clients, deal_cohorts, local_steps
from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.orders import RoundOrders
from cfl.data.schedule import RoundPlan, Schedule


class RoundLoader:
    """Iterates over the local steps of one round: over :class:`CohortBatch` es, or over blocks of several steps.

    The order of a client's samples is keyed by (seed, round, client, epoch), so it is the same for every cohort width.
    With several processes each gets the cohorts of its own share of the clients. All get the same number of batches:
    a process that finishes before the others gets batches without clients. A round without clients is one such batch.

    Args:
        plan: the round; all clients of a cohort belong to the same part of it.
        indices: client -> ``[n]`` indices into the training set of its task.
        schedule: local epochs, batch size, width.
        seed: the run's seed.
        process: number of this process, from 0.
        processes: number of processes that share the clients.
        block: most local steps of a :class:`CohortBlock`; 1 yields single steps.
    """

    def __init__(
        self,
        plan: RoundPlan,
        indices: Mapping[int, np.ndarray],
        schedule: Schedule,
        seed: int,
        process: int = 0,
        processes: int = 1,
        block: int = 1,
    ) -> None:
        self.plan, self.indices, self.schedule, self.seed, self.block = plan, indices, schedule, seed, block
        sizes = {c: len(indices[c]) for c in plan.clients}
        steps = {c: local_steps(size, schedule) for c, size in sizes.items()}
        shares = deal_clients(steps, processes)
        parts = [(part.task, frozenset(part.clients)) for part in plan.parts]
        dealt = [
            [
                (task, group)
                for task, clients in parts
                for group in deal_cohorts({c: sizes[c] for c in share if c in clients}, schedule)
            ]
            for share in shares
        ]
        lengths = [sum(-(-max(steps[c] for c in group) // block) for _, group in groups) for groups in dealt]
        self.cohorts = [group for _, group in dealt[process]]
        self._tasks = [task for task, _ in dealt[process]]
        self._length = max(1, *lengths)  # a round without clients is one batch without clients
        self._idle = self._length - lengths[process]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[CohortBatch | CohortBlock]:
        clients = [client for group in self.cohorts for client in group]
        orders = RoundOrders(self.seed, self.plan.round, clients, self.schedule.local_epochs)
        for number, (task, group) in enumerate(zip(self._tasks, self.cohorts, strict=True)):
            own = [self.indices[client] for client in group]
            lengths = tuple(local_steps(len(samples), self.schedule) for samples in own)
            index, mask = orders.cut(group, own, lengths, self.schedule.batch_size)
            whole = CohortBlock(
                clients=tuple(group),
                sizes=tuple(map(len, own)),
                index=torch.from_numpy(index),
                mask=torch.from_numpy(mask),
                # A step is as wide as its widest batch, so that columns that all clients pad are not computed.
                widths=tuple(np.maximum(mask.sum(-1).max(0), 1).tolist()),
                lengths=lengths,
                task=task,
                cohort=number,
                last_of_round=number + 1 == len(self.cohorts) and not self._idle,
            )
            if self.block == 1:
                yield from whole.steps
            else:
                yield from (whole.part(s, s + self.block) for s in range(0, len(whole), self.block))
        for left in reversed(range(self._idle)):
            yield self._without_clients(last=left == 0)

    def _without_clients(self, last: bool) -> CohortBatch:
        return CohortBatch(
            clients=(),
            sizes=(),
            index=torch.empty((0, 1), dtype=torch.int64),
            mask=torch.empty((0, 1), dtype=torch.bool),
            padded=False,
            task=self.plan.task,
            cohort=len(self.cohorts),
            step=-1,
            closes=(),
            last_of_round=last,
        )
