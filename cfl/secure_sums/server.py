"""The server of the protocol: it forwards clients' keys and shares, adds up masked messages, and unmasks the sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.client import OF_KEY, OF_MASK
from cfl.secure_sums.dropouts import Attendance, check_recoverable
from cfl.secure_sums.graph import shares_needed
from cfl.secure_sums.keys import AgreementKey, as_bytes, tag
from cfl.secure_sums.masks import add_mask
from cfl.secure_sums.shamir import recover
from cfl.secure_sums.traffic import ENVELOPE, PUBLIC, SHARE, TAG
from cfl.secure_sums.wire import listed, numbers, unframed, unlisted


class SumServer:
    """The server of one sum. It is honest but curious: it follows the protocol, but may learn from all that it gets.

    Args:
        session: name of the sum, never used before.
        identities: client -> public signing key, for all clients that are asked for a message.
        graph: takes the clients that have sent keys and returns client -> its neighbours.
        threshold: as for :func:`cfl.secure_sums.graph.shares_needed`.
        count: number of integers in a message.
        modulus: bits of an integer.

    Attributes:
        up: bytes received.
        down: bytes sent.
        neighbours: client -> its neighbours; empty before :meth:`keys`.
    """

    def __init__(
        self,
        session: bytes,
        identities: Mapping[int, bytes],
        graph: Callable[[Collection[int]], Mapping[int, Collection[int]]],
        threshold: float,
        count: int,
        modulus: int,
    ) -> None:
        self._session, self._identities, self._graph = session, identities, graph
        self._threshold, self._modulus = threshold, modulus
        self.up = self.down = 0
        self.neighbours: Mapping[int, Collection[int]] = {}
        self._keys: dict[int, bytes] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._came: set[int] = set()
        self._total = np.zeros(count, dtype=f"<u{modulus // 8}")
        self._tags: dict[int, dict[int, bytes]] = {}
        self._shares: dict[int, dict[int, bytes]] = {}

    # Messages from clients.

    def receive_keys(self, message: bytes) -> None:
        """Receive a client's public keys."""
        client, body = self._unframed(message, "keys", self._keys, self._identities)
        if len(body) != 2 * PUBLIC:
            raise SumRefused(f"keys of client {client} of {len(body)} bytes: truncated")
        self._keys[client] = body

    def receive_shares(self, message: bytes) -> None:
        """Receive a client's encrypted shares."""
        client, body = self._unframed(message, "shares", self._sealed, self._keys)
        near = self.neighbours[client]
        sealed = unlisted(body, ENVELOPE, f"shares of client {client}", lambda other: other in near)
        if len(sealed) < len(near):
            raise SumRefused(f"client {client} has sent {len(sealed)} shares for {len(near)} neighbours: truncated")
        self._sealed[client] = sealed

    def receive_message(self, message: bytes) -> None:
        """Receive a client's masked vector and add it to the sum."""
        client, body = self._unframed(message, "message", self._came, self._sealed)
        if len(body) != self._total.nbytes:
            raise SumRefused(f"a message of client {client} of {len(body)} bytes, not {self._total.nbytes}: truncated")
        self._total += np.frombuffer(body, dtype=self._total.dtype)
        self._came.add(client)

    def receive_check(self, message: bytes) -> None:
        """Receive a client's tags of the list of clients whose messages came."""
        client, body = self._unframed(message, "check", self._tags, self._came)
        self._tags[client] = unlisted(body, TAG, f"tags of client {client}", lambda other: other in self._came)

    def receive_unmasking(self, message: bytes) -> None:
        """Receive the shares that a client was asked for."""
        client, body = self._unframed(message, "unmasking", self._shares, self._tags)
        asked = self._asked(client)
        given = unlisted(body, 1 + SHARE, f"shares from client {client}", lambda other: other in asked)
        if given.keys() != asked.keys() or any(given[other][:1] != kind for other, kind in asked.items()):
            raise SumRefused(f"client {client} has sent other shares than it was asked for: truncated or forged")
        self._shares[client] = {other: share[1:] for other, share in given.items()}

    def _unframed(
        self, message: bytes, stage: str, known: Collection[int], allowed: Collection[int]
    ) -> tuple[int, bytes]:
        client, body = unframed(message, self._session, stage, self._identities)
        if client in known:
            raise SumRefused(f"a second message of client {client} at the stage {stage!r}: replayed")
        if client not in allowed:
            raise SumRefused(f"client {client} sends at the stage {stage!r}, but had dropped out")
        self.up += len(message)
        return client, body

    # Messages to clients: client -> bytes.

    def keys(self) -> dict[int, bytes]:
        """Draw the neighbours; return client -> the public keys of its neighbours."""
        self.neighbours = self._graph(self._keys)
        return self._sent({c: listed({o: self._keys[o] for o in self.neighbours[c]}) for c in self._keys})

    def shares(self) -> dict[int, bytes]:
        """Client -> the shares that its neighbours have encrypted for it."""
        return self._sent(
            {c: listed({o: self._sealed[o][c] for o in self.neighbours[c] if o in self._sealed}) for c in self._sealed}
        )

    def came(self) -> dict[int, bytes]:
        """Client whose message came -> the list of these clients."""
        return self._sent(dict.fromkeys(self._came, numbers(self._came)))

    def requests(self) -> dict[int, tuple[bytes, bytes]]:
        """Client -> the tags of its neighbours, and the list of shares that it is asked for."""
        tags = {}
        for client in self._tags:
            near = [other for other in self.neighbours[client] if client in self._tags.get(other, ())]
            tags[client] = listed({other: self._tags[other][client] for other in near})
        asked = {client: listed(self._asked(client)) for client in self._tags}
        self._sent(tags)
        self._sent(asked)
        return {client: (tags[client], asked[client]) for client in self._tags}

    def _asked(self, client: int) -> dict[int, bytes]:
        dealt = [other for other in (*self.neighbours[client], client) if other in self._sealed]
        return {other: OF_MASK if other in self._came else OF_KEY for other in dealt}

    def _sent(self, messages: dict[int, bytes]) -> dict[int, bytes]:
        self.down += sum(map(len, messages.values()))
        return messages

    # The sum.

    def total(self, what: str) -> np.ndarray:
        """``[d]``, the sum of the vectors of all clients whose messages came, modulo ``2^modulus``.

        Args:
            what: name of the sum, for the error message.

        Raises:
            SumRefused: too few messages or shares came, or shares are forged.
        """
        attendance = Attendance(
            frozenset(self._keys),
            frozenset(self._sealed),
            frozenset(self._came),
            frozenset(self._tags),
            frozenset(self._shares),
        )
        check_recoverable(attendance, self.neighbours, self._threshold, what)
        total = self._total.copy()
        for client in sorted(self._sealed):
            near = [other for other in self.neighbours[client] if other in self._came]
            if client in self._came:
                add_mask(total, tag(as_bytes(self._recovered(client)), self._session), self._modulus, -1)
            elif near:
                self._remove_masks(total, client, near)
        return total

    def _remove_masks(self, total: np.ndarray, client: int, near: Collection[int]) -> None:
        """Remove the masks that neighbours have in common with a client whose own message did not come."""
        pair = AgreementKey(self._recovered(client))
        if pair.public != self._keys[client][PUBLIC:]:
            raise SumRefused(f"the shares of client {client}'s key do not give it: forged")
        for other in near:
            key = pair.agreed(self._keys[other][PUBLIC:], self._session, b"mask")
            add_mask(total, key, self._modulus, -1 if other < client else 1)

    def _recovered(self, client: int) -> int:
        holders = sorted(h for h in (*self.neighbours[client], client) if client in self._shares.get(h, ()))
        needed = shares_needed(self._threshold, len(self.neighbours[client]))
        return recover({h + 1: int.from_bytes(self._shares[h][client], "little") for h in holders[:needed]})
