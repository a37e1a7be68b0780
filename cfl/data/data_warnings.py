"""Finds what is probably not intended in a run's data, as sentences to warn of."""

from __future__ import annotations

import numpy as np

from cfl.data.client_data import ClientDataAssignment
from cfl.data.exposure import OWN_PACE

_USUAL_CHANNELS = 4
"""Most channels that images usually have."""


def data_warnings(data: ClientDataAssignment) -> list[str]:
    """Return warnings about idle clients, unreached tasks, samples that pass by, owners of samples that are ignored or
    do not take part, and swapped axes of images.

    Idle clients may be intended, to leave their samples out. Unreached tasks are evaluated, but not trained. Owners of
    samples are ignored by all partitions except ``Natural``. Axes are probably swapped if images have many channels.
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
    if missed := data.missed_samples():
        why = f"in rounds of tasks in which their clients take no part (data.participation = {data.participation.name})"
        found.append(f"{missed} training samples are met only {why}, and never trained on")
    owners = (task.train.clients for task in data.tasks if not data.partition.by_owner)
    if any(of is not None and len(of.unique()) > 1 for of in owners):
        dealt = f"data.partition = {type(data.partition).__name__} deals samples otherwise"
        found.append(f"the data say whose each sample is, and {dealt}; Natural gives every client its own")
    tested = (task.test.clients for task in data.tasks if data.partition.by_owner)
    if any(of is not None and bool(((of < 0) | (of >= data.num_clients)).any()) for of in tested):
        found.append("some test samples are of clients without training samples; no accuracy of a client counts them")
    channels, height, width = data.stream.shape
    if channels > _USUAL_CHANNELS >= min(height, width):
        read = f"images are read as {channels} channels of {height} x {width} pixels"
        found.append(f"{read}: if that is not meant, their axes are in another order than the data set expects")
    return found
