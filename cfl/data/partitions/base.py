"""The base class of partitions, and two functions that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from cfl.data.named import Named
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError


class Partition(Named, ABC):
    """A rule that deals one task's training samples to clients.

    Attributes:
        name: short lower-case name for reports and run names, e.g. ``dirichlet-0.3``; by default the class's name.
        by_owner: whether every client gets the samples that it owns in the data set.
    """

    by_owner: ClassVar[bool] = False

    def check(self, num_samples: int, num_classes: int, num_clients: int) -> None:
        """Raise ConfigError, naming the setting, if a task of this size cannot be dealt.

        Args:
            num_samples: training samples of the task.
            num_classes: classes among them.
            num_clients: clients that share the task.
        """
        if not 1 <= num_clients <= num_samples:
            raise ConfigError(
                "data.num_clients",
                num_clients,
                f"at least one client per task and at most one per training sample (the task has {num_samples})",
            )

    @abstractmethod
    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """Deal the samples.

        Args:
            labels: ``[N]`` integer class of each sample.
            num_clients: number of clients.
            rng: the only source of randomness.

        Returns:
            for each client the ascending int64 indices of its samples; no sample has two clients.

        Raises:
            ConfigError: as :meth:`check`, or when the labels themselves rule the partition out.
        """

    def deal(
        self, labels: np.ndarray, owners: np.ndarray | None, clients: np.ndarray, rng: np.random.Generator
    ) -> Sequence[np.ndarray]:
        """Deal a task's samples to some of the clients, by default with :meth:`split`, which ignores owners.

        Args:
            labels: ``[N]`` integer class of each sample.
            owners: ``[N]`` client that owns each sample; None if the data set does not say.
            clients: ``[m]`` ids of the clients, ascending.
            rng: as for :meth:`split`.

        Returns:
            as :meth:`split`, in the order of ``clients``.
        """
        return self.split(labels, len(clients), rng)


def group_by_owner(owner: np.ndarray, num_clients: int) -> Shares:
    """Turn ``owner`` (``[N]``, client of each sample, -1 for none) into each client's ascending sample indices."""
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner + 1, minlength=num_clients + 1)
    ends = np.cumsum(counts)
    return Shares(order[ends[0] :], ends - ends[0])


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sample indices ``[N]`` ordered by class, in random order within each class."""
    order = rng.permutation(len(labels))
    return order[np.argsort(labels[order], kind="stable")]
