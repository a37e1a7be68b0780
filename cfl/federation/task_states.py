"""Tensors that clients keep for each task they have learned, stored when they begin the next task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cfl.federation.client_states import ClientStates


class TaskStates:
    """Named tensors per client and task, and the current task of each client.

    Tasks are numbered by their position in a client's own sequence. The tensors are part of the clients' states, and
    therefore of checkpoints. The current task has the topic ``<topic> task``, the tensors of a task ``<topic> <task>``.

    Args:
        clients: the clients' states.
        topic: the first word of the topics.
    """

    def __init__(self, clients: ClientStates, topic: str) -> None:
        self.clients, self.topic = clients, topic

    def latest(self, clients: Sequence[int]) -> list[int]:
        """The current task of each client, -1 before its first."""
        nothing = {"task": torch.tensor(-1)}
        found: list[int] = self.clients.gather(f"{self.topic} task", clients, nothing)["task"].tolist()
        return found

    def begin(self, clients: Sequence[int], task: int) -> None:
        """Set the clients' current task to ``task``."""
        stacked = {"task": torch.full((len(clients),), task)}
        self.clients.scatter(f"{self.topic} task", clients, stacked)

    def store(self, clients: Sequence[int], tasks: Sequence[int], stacked: Mapping[str, Tensor]) -> None:
        """Store row j of ``stacked`` (name -> ``[k, ...]``) for client ``clients[j]`` and task ``tasks[j]``."""
        for task in sorted(set(tasks)):
            rows = [j for j, theirs in enumerate(tasks) if theirs == task]
            chosen = {name: values[rows] for name, values in stacked.items()}
            self.clients.scatter(f"{self.topic} {task}", [clients[j] for j in rows], chosen)

    def stored(self, client: int, task: int) -> dict[str, Tensor] | None:
        """A copy of a client's tensors of a task; None if it has stored none, as for its current task."""
        return self.clients.get(f"{self.topic} {task}", client)

    def counts(self, num_tasks: int) -> Counter[int]:
        """Client -> number of tasks, among the first ``num_tasks``, for which it has stored tensors."""
        return Counter(client for task in range(num_tasks) for client in self.clients.holders(f"{self.topic} {task}"))
