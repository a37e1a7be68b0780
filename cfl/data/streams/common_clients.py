"""Numbers the clients of several data sets, and of their training and test samples, alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cfl.data.sources.labels import common_names, renumbered
from cfl.data.types import ImageSet, Task


def with_common_clients(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with one number for each client, by the order of the clients' names in all data sets together.

    Training and test sets number their own clients. A client that is missing in one of them would otherwise have
    another number there. The names are those of clients with training samples: test samples of others get the client
    -1. Training sets stay as they are where a data set has numbers of clients without names.
    """
    owned = [task.train for task in tasks if task.train.clients is not None]
    names = common_names(owned)
    common = all(train.client_names for train in owned)
    changed: dict[int, ImageSet] = {}  # tasks that share samples share them afterwards, too

    def of(samples: ImageSet, names: tuple[Any, ...]) -> ImageSet:
        if id(samples) not in changed:
            changed[id(samples)] = renumbered(samples, names)
        return changed[id(samples)]

    found = []
    for task in tasks:
        known = names if common else task.train.client_names
        train, test = of(task.train, known), of(task.test, known)
        same = train is task.train and test is task.test
        found.append(task if same else replace(task, train=train, test=test))
    return found
