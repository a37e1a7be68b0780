"""Who gives one and the same answer to a test sample under a global model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cfl.models.density import densities_differ

if TYPE_CHECKING:
    from cfl.federation.federation import Federation

Owners = Sequence[tuple[int | None, int]]
"""(client, task) of entries of a matrix that a test is counted into; None where there is one matrix for all."""


def answering_alike(federation: Federation, stream_task: int, owners: Owners) -> list[tuple[Sequence[int], Owners]]:
    """What a test of the global model has to compute: clients that answer together, and what their score counts for.

    Usually all answer alike. Where networks are another density at every client (MADE with ``synchronised: false``),
    the global model is one by each client's own masks: a matrix of a client takes that client's score, and the one
    matrix of all takes the mean over the clients that hold the task. That is a pass over the tests per client.

    Args:
        federation: whose model.
        stream_task: of whose test samples there is a score.
        owners: what the score is to be counted for.
    """
    if not densities_differ(federation.network):
        return [((0,), owners)]
    found: list[tuple[Sequence[int], Owners]] = []
    for client, task in owners:
        whose = federation.members(stream_task) if client is None else [client]
        found.append((whose, [(client, task)]))
    return found
