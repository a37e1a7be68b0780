"""Keeps clients' newest results of their current task, whose end is found only afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cfl.data.task_handles import TaskRef
from cfl.federation.channel import payload_bytes
from cfl.methods.context import Context

Tensors = dict[str, Tensor]


class NewestTwo:
    """Keeps, for every client, the two newest of the results that it computes every few rounds, with their rounds.

    When a boundary is found (:class:`cfl.methods.capabilities.FoundTasks`), the old task's samples are gone. A client's
    newest result may be of the new task's samples. The result before it is then of the old task, unless the client has
    computed two results since the task changed.

    Args:
        context: context of the method.
        name: prefix of the topics under which clients keep the results.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._context = context
        self._newest, self._before, self._rounds = (f"{name} {which}" for which in ("newest", "before", "rounds"))
        self._boundary = f"{name} boundary"
        self._never = {self._newest: torch.tensor(-1), self._before: torch.tensor(-1)}

    def keep(self, client: int, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a client's result of a round in place of the older of its two. One with NaN or infinity is not kept.

        Args:
            client: the client.
            round: round of the result, later than those of the client's earlier results.
            tensors: names and shapes are always the same.
        """
        clients = self._context.clients
        found = {name: values[None] for name, values in tensors.items()}
        if not self._context.channel.usable(found, [client], self._newest)[0]:
            return
        rounds, before = clients.gather(self._rounds, [client], self._never), clients.get(self._newest, client)
        if before is not None:
            clients.scatter(self._before, [client], {name: values[None] for name, values in before.items()})
        clients.scatter(self._newest, [client], found)
        clients.scatter(
            self._rounds, [client], {self._newest: torch.tensor([round]), self._before: rounds[self._newest]}
        )

    def computed_in(self, rounds: range) -> dict[int, int]:
        """Client -> the newest of these rounds of which it keeps a result, ascending by client.

        Clients without such a result, and clients that have dropped out of the current round, are left out.
        """
        found = {}
        dropped = self._context.channel.dropped_now
        for topic in (self._before, self._newest):
            for client, round in self._rounds_of(topic).items():
                if round in rounds and client not in dropped:
                    found[client] = round
        return dict(sorted(found.items()))

    def read(self, task: TaskRef, rounds: range, chosen: Mapping[int, int]) -> Iterator[tuple[int, Tensors]]:
        """Tell clients the rounds of the task that has ended, and read the results that they keep of it.

        Args:
            task: the clients' current task.
            rounds: the rounds of the task that has ended.
            chosen: client -> round, some of :meth:`computed_in`, the same in all processes.

        Yields:
            Clients of this process, and their tensors on the network's device.
        """
        context = self._context
        newest = self._rounds_of(self._newest)
        own = context.own_clients(task, list(chosen))
        context.channel.downlink(self._boundary, {"rounds": torch.tensor([rounds.start, rounds.stop])}, len(own))
        for client in own:
            topic = self._newest if newest[client] == chosen[client] else self._before
            kept = context.clients.get(topic, client) or {}
            yield client, {name: values.to(context.device) for name, values in kept.items()}

    def bytes(self) -> int:
        """Bytes of both results and their rounds at one client; 0 before any result is kept."""
        holders = self._context.clients.holders(self._newest)
        kept = self._context.clients.get(self._newest, holders[0]) if holders else None
        return 0 if kept is None else 2 * payload_bytes(kept) + payload_bytes(self._never)

    def _rounds_of(self, topic: str) -> dict[int, int]:
        clients = self._context.clients.holders(self._rounds)
        if not clients:
            return {}
        rounds = self._context.clients.gather(self._rounds, clients, self._never)[topic].tolist()
        return dict(zip(clients, rounds, strict=True))
