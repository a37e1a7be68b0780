"""Numbers the clients of several data sets, and of their training and test samples, alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cfl.data.types import ImageSet, Task


def with_common_clients(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with one number for each client, by the order of the clients' names in all data sets together.

    Training and test sets number their own clients. A client that is missing in one of them would otherwise have
    another number there. The names are those of clients with training samples: test samples of others get the client
    -1. Training sets stay as they are where a data set has numbers of clients without names.
    """
    owned = [task.train for task in tasks if task.train.clients is not None]
    different = {name for train in owned for name in train.client_names}
    whole = all(isinstance(name, int) for name in different)
    names: tuple[Any, ...] = tuple(sorted(different) if whole else sorted({*map(str, different)}))
    common = all(train.client_names for train in owned)
    renumbered: dict[int, ImageSet] = {}  # tasks that share samples share them afterwards, too

    def of(samples: ImageSet, names: tuple[Any, ...]) -> ImageSet:
        if samples.clients is None or samples.client_names in ((), names):
            return samples
        if id(samples) not in renumbered:
            places = {str(name): place for place, name in enumerate(names)}
            own = torch.tensor([places.get(str(name), -1) for name in samples.client_names])
            renumbered[id(samples)] = replace(samples, clients=own[samples.clients], client_names=names)
        return renumbered[id(samples)]

    found = []
    for task in tasks:
        known = names if common else task.train.client_names
        train, test = of(task.train, known), of(task.test, known)
        same = train is task.train and test is task.test
        found.append(task if same else replace(task, train=train, test=test))
    return found
