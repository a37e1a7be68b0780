"""Runs the protocol for one sum with all parties in this process, as messages arrive and clients drop out."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

import numpy as np

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.client import SumClient
from cfl.secure_sums.dropouts import STAGES
from cfl.secure_sums.graph import neighbours_of
from cfl.secure_sums.keys import Identity
from cfl.secure_sums.server import SumServer
from cfl.secure_sums.settings import SumSettings
from cfl.secure_sums.traffic import SESSION


class ProtocolSum:
    """Runs the stages of one sum.

    Args:
        asked: clients of which the server wants a message.
        gone: clients among ``asked`` that drop out.
        settings: with the stage before which they drop out, the number of neighbours, and the threshold.
        generator: draws the neighbours.
        count: number of integers in a message.
        modulus: bits of an integer.

    Attributes:
        server: the sum's server.
        clients: number -> client.
    """

    def __init__(
        self,
        asked: Sequence[int],
        gone: Collection[int],
        settings: SumSettings,
        generator: np.random.Generator,
        count: int,
        modulus: int,
    ) -> None:
        session, identities = secrets.token_bytes(SESSION), {client: Identity() for client in sorted(asked)}
        self._gone, self._stage = frozenset(gone), STAGES.index(settings.stage)
        self.server = SumServer(
            session,
            {client: identity.public for client, identity in identities.items()},
            lambda clients: neighbours_of(clients, settings.neighbours, generator),
            settings.threshold,
            count,
            modulus,
        )
        self.clients = {c: SumClient(c, own, session, settings.threshold, modulus) for c, own in identities.items()}
        for client in self._left("keys", self.clients):
            self.server.receive_keys(self.clients[client].keys())
        keys = self.server.keys()
        for client in self._left("shares", keys):
            self.server.receive_shares(self.clients[client].shares(keys[client]))
        self._shares = self.server.shares()

    def _left(self, stage: str, clients: Collection[int]) -> list[int]:
        return [c for c in sorted(clients) if STAGES.index(stage) < self._stage or c not in self._gone]

    def add(self, client: int, vector: np.ndarray) -> None:
        """Send a client's message; arguments as for :meth:`cfl.secure_sums.client.SumClient.message`.

        Raises:
            SumRefused: the client has dropped out, or too many of its neighbours have.
        """
        if client not in self._left("message", self._shares):
            raise SumRefused(f"a message of client {client}, which has dropped out")
        self.server.receive_message(self.clients[client].message(self._shares[client], vector))

    def total(self, what: str) -> np.ndarray:
        """The sum; arguments and errors as for :meth:`cfl.secure_sums.server.SumServer.total`."""
        came = self.server.came()
        for client in self._left("check", came):
            self.server.receive_check(self.clients[client].check(came[client]))
        requests = self.server.requests()
        for client in self._left("unmasking", requests):
            self.server.receive_unmasking(self.clients[client].unmasking(*requests[client]))
        return self.server.total(what)
