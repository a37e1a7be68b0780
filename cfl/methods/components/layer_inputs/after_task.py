"""Lets clients compute something of a task that has ended, one after another, without sending it to the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cfl.data.schedule import RoundPlan
from cfl.methods.components.client_model import evaluating

if TYPE_CHECKING:
    from cfl.methods.context import Context

T = TypeVar("T")


def figures_after_task(
    context: Context, plan: RoundPlan, clients: Sequence[int], compute: Callable[[int, int], T]
) -> tuple[list[T], float]:
    """Let clients compute something of a task in an extra round, in evaluation mode.

    A client that dropped out of the task's last round is sent the model, and computes nothing.

    Args:
        context: of the method.
        plan: of the task's last round.
        clients: clients of the extra round.
        compute: called with the task and the client's id, for each client of this process; its result is a plain value
            that goes to all processes.

    Returns:
        The results of all clients, ascending by client, and the seconds that this took in the first process.
    """
    started = time.perf_counter()
    lost = context.channel.dropped_before_message(plan.round)
    own = [client for client in context.extra_round(plan.task, clients) if client not in lost]
    with evaluating(context):
        found = {client: compute(plan.task, client) for client in own}
    of_all = {client: result for part in context.everyones(found) for client, result in part.items()}
    return [of_all[client] for client in sorted(of_all)], context.at_server(lambda: time.perf_counter() - started)
