"""Participation: which clients hold data of which task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from cfl.data.named import Named
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers, check_numbers


class Participation(Named, ABC):
    """A rule that says which clients take part in each task. Sampling per round happens among these.

    Attributes:
        name: short lower-case name for reports and run names; by default the class's name.
        min_samples: fewest training samples of a task with which a client takes part in it; with 0, a partition that
            leaves a client without a batch is refused.
    """

    min_samples = 0

    @abstractmethod
    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        """Ascending int64 client ids of each task, at least one per task; tasks may share memory.

        Args:
            num_clients: number of clients in the whole federation, at least 1.
            num_tasks: number of tasks.
            seed: the run's seed; task ``t`` draws from the generator of (seed, "participation", t).

        Raises:
            ConfigError: a setting that does not fit the number of clients.
        """


def members_checked(participation: Participation, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
    """Return :meth:`Participation.members` after checking that they are ascending client ids for each task.

    Raises:
        ConfigError: as :meth:`Participation.members`, or ``data.participation``: its class returns something else.
    """
    found = participation.members(num_clients, num_tasks, seed)
    who = type(participation).__name__
    if not isinstance(found, Sequence) or len(found) != num_tasks:
        what = f"{len(found)} tasks" if isinstance(found, Sequence) else type(found).__name__
        raise ConfigError(
            "data.participation", f"{who}, which gives {what}", f"client ids of each of {num_tasks} tasks"
        )
    known: dict[int, np.ndarray] = {}  # tasks may share memory
    for task, clients in enumerate(found):
        ids = known.setdefault(id(clients), np.asarray(clients))
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            what = f"{ids.dtype} {list(ids.shape)} for task {task}"
        elif not (ids[0] >= 0 and ids[-1] < num_clients and bool((ids[1:] > ids[:-1]).all())):
            what = f"{len(ids)} clients for task {task}, the first {ids[0]} and the last {ids[-1]}"
        else:
            continue
        valid = f"ascending integers from 0 to {num_clients - 1} for each task, at least one"
        raise ConfigError("data.participation", f"{who}, which gives {what}", valid)
    return [known[id(clients)].astype(np.int64, copy=False) for clients in found]


class AllClients(Participation):
    """Every client takes part in every task."""

    name = "all"

    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        """See :meth:`Participation.members`."""
        return [np.arange(num_clients)] * num_tasks


class RandomShare(Participation):
    """A random share of the clients per task, drawn without replacement and independently for each task.

    Source: task heterogeneity in FOT (Bakman et al., ICLR 2024), Table 10, share 0.6.

    Args:
        share: share of the clients, above 0, at most 1; their number is rounded to the nearest integer, at least 1,
            like ``schedule.clients_per_round``.

    Raises:
        ConfigError: ``data.participation.share`` outside (0, 1].
    """

    def __init__(self, share: float = 0.6) -> None:
        check_numbers("data.participation", "(0, 1]", share=share)
        self.share = share
        self.name = f"share-{share:g}"

    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        """See :meth:`Participation.members`."""
        count = max(1, round(self.share * num_clients))
        return [
            np.sort(numpy_generator(seed, "participation", t).choice(num_clients, size=count, replace=False))
            for t in range(num_tasks)
        ]


class Joining(Participation):
    """Clients join over time and stay: the first ``initial`` at task 0, then ``per_task`` more with each task.

    Source: the client-increment experiment of Fed-A-GEM (Dai et al., 2024), Table 15: 30 clients, 10 more per task.

    Args:
        initial: clients of task 0, between 1 and the number of clients.
        per_task: clients that join with every further task until all have joined, at least 0.

    Raises:
        ConfigError: ``data.participation.initial`` below 1, ``data.participation.per_task`` below 0.
    """

    def __init__(self, initial: int, per_task: int) -> None:
        check_integers("data.participation", 1, initial=initial)
        check_integers("data.participation", 0, per_task=per_task)
        self.initial, self.per_task = initial, per_task
        self.name = f"joining-{initial}+{per_task}"

    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        """See :meth:`Participation.members`.

        Raises:
            ConfigError: also when ``data.participation.initial`` exceeds the number of clients.
        """
        if self.initial > num_clients:
            raise ConfigError(
                "data.participation.initial", self.initial, f"between 1 and data.num_clients = {num_clients}"
            )
        everyone = np.arange(num_clients)
        return [everyone[: self.initial + t * self.per_task] for t in range(num_tasks)]


class Holders(Participation):
    """Only clients with samples of a task take part in its rounds.

    Meant for partitions that leave clients without samples of some tasks (``Dirichlet`` with ``min_samples: 0``, tasks
    dealt once). The clients are known only when the data are read. An integer ``schedule.clients_per_round`` is the
    largest number of clients in a round; if fewer hold the task, all of them train. If a task's rounds train on other
    tasks as well (``data.exposure``), only the samples of that task count here.

    Args:
        of: rule for the clients that may take part, not another Holders; all clients if not given.
        min_samples: fewest training samples of a task, validation not counted, at least 1; with
            ``schedule.drop_last`` at least a batch is needed, too.

    Raises:
        ConfigError: ``data.participation.min_samples`` below 1, or ``of`` with a ``min_samples`` of its own.
    """

    def __init__(self, of: Participation | None = None, min_samples: int = 1) -> None:
        check_integers("data.participation", 1, min_samples=min_samples)
        if of is not None and of.min_samples:
            most = max(min_samples, of.min_samples)
            valid = f"a rule without min_samples, and data.participation.min_samples = {most}, the larger of both"
            raise ConfigError("data.participation.of", of.name, valid)
        self.of = AllClients() if of is None else of
        self.min_samples = min_samples
        self.name = f"holders-{self.of.name}" + (f"-{min_samples}" if min_samples > 1 else "")

    def members(self, num_clients: int, num_tasks: int, seed: int) -> list[np.ndarray]:
        """See :meth:`Participation.members`: the clients that may take part."""
        return self.of.members(num_clients, num_tasks, seed)
