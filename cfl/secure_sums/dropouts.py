"""Clients that drop out of a sum: at which stage, and whether the sum can still be recovered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cfl.runtime.errors import SumRefused
from cfl.secure_sums.graph import shares_needed

STAGES = ("keys", "shares", "message", "check", "unmasking")
"""The stages of a sum, each of which begins with a message from every client that has not dropped out."""
UNTIL_MESSAGE = STAGES[:3]
"""The first stages: a client that drops out before one of these has not sent its masked message."""


@dataclass(frozen=True)
class Attendance:
    """Which clients of a sum have sent the message of each stage.

    Attributes:
        keys: clients that have sent their keys.
        shares: clients that have sent shares of their secrets.
        message: clients that have sent their masked message, which is in the sum.
        check: clients that have sent tags of the list of clients whose messages came.
        unmasking: clients that have sent the requested shares.
    """

    keys: frozenset[int]
    shares: frozenset[int]
    message: frozenset[int]
    check: frozenset[int]
    unmasking: frozenset[int]

    @classmethod
    def of(cls, asked: Collection[int], gone: Collection[int], stage: str, came: Collection[int]) -> Attendance:
        """The attendance if ``gone`` drop out before ``stage``, and only ``came`` send a masked message."""
        left = frozenset(asked) - frozenset(gone)
        sets, still = [], frozenset(asked)
        for name in STAGES:
            still = still & left if STAGES.index(stage) <= STAGES.index(name) else still
            still = still & frozenset(came) if name == "message" else still
            sets.append(still)
        return cls(*sets)


def check_recoverable(
    attendance: Attendance, neighbours: Mapping[int, Collection[int]], threshold: float, what: str
) -> None:
    """Refuse a sum that the protocol cannot recover or must not show.

    Args:
        attendance: the clients that have sent at each stage.
        neighbours: client that has sent keys -> its neighbours.
        threshold: as for :func:`cfl.secure_sums.graph.shares_needed`.
        what: name of the sum, for the error message.

    Raises:
        SumRefused: fewer than two messages came, no mask connects some of the clients whose messages came with the
            others, or fewer holders of a client's shares are left than are needed.
    """
    came = attendance.message
    if len(came) < 2:
        raise SumRefused(f"{what}: {len(came)} of {len(attendance.keys)} messages came, and a sum of one hides nothing")
    group = _connected(min(came), came, neighbours)
    if len(group) < len(came):
        raise SumRefused(
            f"{what}: no mask connects {len(group)} of the {len(came)} clients whose messages came with the others, so "
            "that the server could tell their sums apart; more federated.neighbours, or fewer dropouts "
            "(schedule.client_dropout), connect them"
        )
    away = len(attendance.keys - attendance.unmasking)
    if all(len(near) + 1 - away >= shares_needed(threshold, len(near)) for near in neighbours.values()):
        return  # enough holders, even if all clients that are away hold shares of the same client
    for client in sorted(attendance.shares):
        holders = {*neighbours[client], client}
        if client not in came and not came & holders:
            continue  # no message in the sum has a mask of this client
        needed, left = shares_needed(threshold, len(neighbours[client])), len(holders & attendance.unmasking)
        if left < needed:
            raise SumRefused(
                f"{what}: {left} of the {len(holders)} clients that hold shares of client {client}'s secrets are left, "
                f"and {needed} are needed; fewer dropouts (schedule.client_dropout), or more federated.neighbours or a "
                "lower federated.share_threshold where these can be changed, recover it"
            )


def _connected(first: int, among: Collection[int], neighbours: Mapping[int, Collection[int]]) -> set[int]:
    """The clients of ``among`` that masks connect with ``first``, directly or by others of them."""
    found, new = {first}, [first]
    while new:
        near = {one for one in neighbours[new.pop()] if one in among} - found
        found |= near
        new += near
    return found
