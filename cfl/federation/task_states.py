"""What clients keep of every task that they have learned, filed away when they begin another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cfl.federation.client_states import ClientStates


class TaskStates:
    """Named tensors per client and task, and which task each client is at.

    A task is its place in a client's own sequence. Held in the clients' states, hence in checkpoints and known to all
    processes, under ``<topic> task`` and, for each task, ``<topic> <task>``.

    Args:
        clients: what clients keep.
        topic: the first word of the topics.
    """

    def __init__(self, clients: ClientStates, topic: str) -> None:
        self.clients, self.topic = clients, topic

    def latest(self, clients: Sequence[int]) -> list[int]:
        """The task that each client has begun last, -1 for none."""
        nothing = {"task": torch.tensor(-1)}
        found: list[int] = self.clients.gather(f"{self.topic} task", clients, nothing)["task"].tolist()
        return found

    def begin(self, clients: Sequence[int], task: int, keep: Sequence[bool] | None = None) -> None:
        """From here on the clients are at ``task``, but for those whose ``keep`` is False."""
        stacked = {"task": torch.full((len(clients),), task)}
        self.clients.scatter(f"{self.topic} task", clients, stacked, keep)

    def file(self, clients: Sequence[int], tasks: Sequence[int], stacked: Mapping[str, Tensor]) -> None:
        """Keep row j of ``stacked`` (name -> ``[k, ...]``) as client ``clients[j]``'s of task ``tasks[j]``."""
        for task in sorted(set(tasks)):
            rows = [j for j, theirs in enumerate(tasks) if theirs == task]
            chosen = {name: values[rows] for name, values in stacked.items()}
            self.clients.scatter(f"{self.topic} {task}", [clients[j] for j in rows], chosen)

    def of(self, client: int, task: int) -> dict[str, Tensor] | None:
        """What a client keeps of a task, copied; None if it has filed nothing of it, as of the task that it is at."""
        return self.clients.get(f"{self.topic} {task}", client)

    def filed(self, num_tasks: int) -> Counter[int]:
        """Client -> the number of tasks that it has filed something of, of the first ``num_tasks``."""
        return Counter(client for task in range(num_tasks) for client in self.clients.holders(f"{self.topic} {task}"))
