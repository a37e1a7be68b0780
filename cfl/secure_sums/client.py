"""A client of the protocol: what it sends at each stage, and which of the server's requests it refuses."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable

import numpy as np

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.dropouts import STAGES
from cfl.secure_sums.graph import shares_needed
from cfl.secure_sums.keys import AgreementKey, Identity, as_bytes, decrypt, encrypt, tag
from cfl.secure_sums.masks import add_mask
from cfl.secure_sums.shamir import split
from cfl.secure_sums.traffic import ENVELOPE, PUBLIC, SHARE, TAG
from cfl.secure_sums.wire import framed, listed, unlisted

OF_KEY, OF_MASK = b"k", b"m"
"""The secret of a client of which the server asks for a share: its masking key, or the seed of its own mask."""


class SumClient:
    """One client in one sum. Its functions are called once each, in the order of the stages.

    A client's message is its vector plus a mask of its own, plus or minus one mask for each neighbour. Of two
    neighbours, one adds their common mask and the other subtracts it. A client's neighbours and the client itself hold
    shares of two secrets: the seed of its own mask, and its masking key. If the client's message came, they reveal the
    shares of the seed, else those of the key. They never reveal both, because both together show the message. As the
    server could ask some of them for the seed and others for the key, clients first compare the list of clients whose
    messages came, by tags under the keys of each pair.

    Args:
        number: number of the client.
        identity: its signing key.
        session: name of the sum, never used before.
        threshold: as for :func:`cfl.secure_sums.graph.shares_needed`.
        modulus: bits of the integers.
    """

    def __init__(self, number: int, identity: Identity, session: bytes, threshold: float, modulus: int) -> None:
        self.number, self._identity, self._session = number, identity, session
        self._threshold, self._modulus = threshold, modulus
        self._stages = iter(STAGES)
        self._sealing, self._masking = AgreementKey(), AgreementKey()
        self._seed = secrets.randbits(255)
        self._public: dict[int, bytes] = {}
        self._pair_keys: dict[int, bytes] = {}
        self._sealed: dict[int, bytes] = {}
        self._list = b""
        self._came: frozenset[int] = frozenset()

    def keys(self) -> bytes:
        """Public keys: one to encrypt shares with, one to agree on masks."""
        self._begin("keys")
        return self._framed("keys", self._sealing.public + self._masking.public)

    def shares(self, keys: bytes) -> bytes:
        """Encrypted shares of the two secrets for each neighbour, given the neighbours' public keys."""
        self._begin("shares")
        known = unlisted(keys, 2 * PUBLIC, "neighbours' keys", lambda other: other != self.number)
        if not known:
            raise SumRefused(f"client {self.number} has no neighbour: a sum of one message hides nothing")
        if len(set(known.values())) < len(known):
            raise SumRefused("two neighbours with the same keys: replayed or forged")
        self._needed = shares_needed(self._threshold, len(known))
        self._public = {other: both[PUBLIC:] for other, both in known.items()}
        self._pair_keys = {o: self._sealing.agreed(b[:PUBLIC], self._session, b"shares") for o, b in known.items()}
        holders = [*known, self.number]
        dealt = [split(s, [h + 1 for h in holders], self._needed) for s in (self._masking.secret, self._seed)]
        both = {h: as_bytes(key) + as_bytes(seed) for h, key, seed in zip(holders, *dealt, strict=True)}
        self._own_share = both.pop(self.number)[SHARE:]
        return self._framed(
            "shares",
            listed({o: encrypt(self._pair_keys[o], b, self._context(self.number, o)) for o, b in both.items()}),
        )

    def message(self, sealed: bytes, vector: np.ndarray) -> bytes:
        """The masked vector, given the shares that neighbours have sent.

        Args:
            sealed: the encrypted shares.
            vector: ``[d]`` unsigned integers of the modulus's size.
        """
        self._begin("message")
        self._sealed = unlisted(sealed, ENVELOPE, "neighbours' shares", lambda other: other in self._public)
        if len(self._sealed) + 1 < self._needed:
            raise SumRefused(
                f"{len(self._sealed)} neighbours of client {self.number} are left of {self._needed} needed"
            )
        total = vector.copy()
        add_mask(total, tag(as_bytes(self._seed), self._session), self._modulus, 1)
        for other in self._sealed:
            key = self._masking.agreed(self._public[other], self._session, b"mask")
            add_mask(total, key, self._modulus, 1 if self.number < other else -1)
        return self._framed("message", total.tobytes())

    def check(self, came: bytes) -> bytes:
        """Tags of the list of clients whose messages came, one for each neighbour in the list."""
        self._begin("check")
        self._came = frozenset(unlisted(came, 0, "the list of messages", lambda other: True))
        near = self._near(self._came)
        if self.number not in self._came or len(near) + 1 < self._needed:
            raise SumRefused(f"a list without client {self.number}, or with too few of its neighbours")
        self._list = came
        return self._framed("check", listed({o: tag(self._pair_keys[o], self._named(self.number)) for o in near}))

    def unmasking(self, tags: bytes, asked: bytes) -> bytes:
        """The shares that the server asks for, given neighbours' tags.

        Args:
            tags: neighbour -> tag.
            asked: client -> :data:`OF_KEY` or :data:`OF_MASK`.

        Raises:
            SumRefused: a neighbour got another list, too few neighbours confirm the list, or the server asks for shares
                of a client's key although its message came, or of its own mask although it did not.
        """
        self._begin("unmasking")
        found = unlisted(tags, TAG, "tags of the list", lambda other: other in self._came and other in self._sealed)
        for other, seen in found.items():
            if not secrets.compare_digest(seen, tag(self._pair_keys[other], self._named(other))):
                raise SumRefused(f"client {other} has got another list of messages, or its tag is forged")
        if len(found) + 1 < self._needed:
            raise SumRefused(f"{len(found)} neighbours confirm the list to client {self.number}, too few")
        requests = unlisted(asked, 1, "requests for shares", lambda o: o in self._sealed or o == self.number)
        given = {}
        for other, kind in requests.items():
            if kind != (OF_MASK if other in self._came else OF_KEY):
                which = "key of client" if kind == OF_KEY else "own mask of client"
                case = "whose message came" if other in self._came else "whose message did not come"
                raise SumRefused(f"the server asks for the {which} {other}, {case}: with both it would see the message")
            given[other] = kind + self._share_of(other, kind)
        return self._framed("unmasking", listed(given))

    def _share_of(self, other: int, kind: bytes) -> bytes:
        if other == self.number:
            return self._own_share
        plain = decrypt(self._pair_keys[other], self._sealed[other], self._context(other, self.number))
        return plain[:SHARE] if kind == OF_KEY else plain[SHARE:]

    def _begin(self, stage: str) -> None:
        if next(self._stages, None) != stage:
            self._stages = iter(())
            raise SumRefused(f"client {self.number} is asked for its {stage!r} a second time, or out of turn: replayed")

    def _framed(self, stage: str, body: bytes) -> bytes:
        return framed(self._identity, self._session, stage, self.number, body)

    def _near(self, others: Iterable[int]) -> list[int]:
        return sorted(self._sealed.keys() & frozenset(others))

    def _context(self, sender: int, receiver: int) -> bytes:
        return self._session + struct.pack("<II", sender, receiver)

    def _named(self, sender: int) -> bytes:
        return struct.pack("<I", sender) + self._list
