"""What a run leaves out, in words to warn of: clients that take part in no task, and tasks that no client reaches."""

from __future__ import annotations

import numpy as np

from cfl.data.client_data import ClientDataAssignment
from cfl.data.exposure import OWN_PACE


def left_out(data: ClientDataAssignment) -> list[str]:
    """A sentence for the clients that take part in no task, and one for the tasks that no client trains on.

    Idle clients may be intended, to leave their samples out. Accuracies of unreached tasks are those of untrained ones.
    """
    found = []
    idle = np.setdiff1d(np.arange(data.num_clients), np.concatenate(data.members)).tolist()
    if idle:
        some = ", ".join(map(str, idle[:5])) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        who = f"client {some} takes" if len(idle) == 1 else f"clients {some} take"
        key = f"data.participation = {data.participation.name}"
        found.append(f"{who} part in none of the {data.num_tasks} tasks ({key})")
    tasks = data.unreached_tasks() if data.exposure in OWN_PACE else []
    if tasks:
        some = f"task {tasks[0]}" if len(tasks) == 1 else f"tasks {', '.join(map(str, tasks))}"
        count = data.num_tasks if data.exposure == "asynchronous" else data.num_rounds
        ends = f"{count} portions of data.portion = {data.portion} end before"
        found.append(f"no client trains on {some} (from 0): {ends}")
    return found
