"""Numbers the clients of several data sets alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cfl.data.types import Task


def with_common_clients(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with one number for each client, by the order of the clients' names in all data sets together.

    Data sets number their own clients. A client that is missing in one of them would otherwise have another number
    there. Tasks stay as they are where a data set has numbers of clients without names.
    """
    owned = [task.train for task in tasks if task.train.clients is not None]
    if not all(train.client_names for train in owned):
        return list(tasks)
    different = {name for train in owned for name in train.client_names}
    whole = all(isinstance(name, int) for name in different)
    names: tuple[Any, ...] = tuple(sorted(different) if whole else sorted({*map(str, different)}))
    places = {name: place for place, name in enumerate(names)}
    return [_renumbered(task, names, places, whole) for task in tasks]


def _renumbered(task: Task, names: tuple[Any, ...], places: dict[Any, int], whole: bool) -> Task:
    train = task.train
    if train.clients is None or train.client_names == names:
        return task
    own = torch.tensor([places[name if whole else str(name)] for name in train.client_names])
    return replace(task, train=replace(train, clients=own[train.clients], client_names=names))
