"""Bytes of the protocol's messages, computed without sending them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cfl.secure_sums.dropouts import Attendance

SESSION, NUMBER, PUBLIC, SHARE, TAG = 16, 4, 32, 32, 32
"""Bytes of a session's name, of a client's number, of a public key, of one secret's share, and of a tag."""
HEADER = SESSION + 1 + NUMBER
"""Bytes in front of a client's message: session, stage, sender."""
SIGNATURE = 64
"""Bytes of the signature at the end of a client's message."""
ENVELOPE = 2 * SHARE + 16
"""Bytes of the two shares that one client sends another, encrypted."""


def traffic(attendance: Attendance, neighbours: Mapping[int, Collection[int]], vector: int) -> tuple[int, int]:
    """Bytes that the clients of a sum send, and that they receive.

    Args:
        attendance: the clients that send at each stage.
        neighbours: client that has sent keys -> its neighbours.
        vector: bytes of a masked message's numbers.
    """

    def near(client: int, others: Collection[int]) -> int:
        return sum(other in others for other in neighbours[client])

    a, frame = attendance, HEADER + SIGNATURE
    up = len(a.keys) * (frame + 2 * PUBLIC)
    down = sum(near(c, a.keys) * (NUMBER + 2 * PUBLIC) for c in a.keys)
    up += sum(frame + near(c, a.keys) * (NUMBER + ENVELOPE) for c in a.shares)
    down += sum(near(c, a.shares) * (NUMBER + ENVELOPE) for c in a.shares)
    up += len(a.message) * (frame + vector)
    down += len(a.message) * NUMBER * len(a.message)
    up += sum(frame + near(c, a.message) * (NUMBER + TAG) for c in a.check)
    down += sum(near(c, a.check) * (NUMBER + TAG) for c in a.check)
    # The requested shares: of the neighbours that have sent shares, and of the client itself.
    down += sum((near(c, a.shares) + 1) * (NUMBER + 1) for c in a.check)
    up += sum(frame + (near(c, a.shares) + 1) * (NUMBER + 1 + SHARE) for c in a.unmasking)
    return up, down
