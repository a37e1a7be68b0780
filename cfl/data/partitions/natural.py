"""Every client has the samples that it owns in the data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError


class Natural(Partition):
    """Each client holds the samples that the data set says are its own; nothing is drawn.

    ``data.num_clients`` has to be the number of clients in the data. They are numbered from 0, in the order of their
    names or numbers in all data sets together. Samples of clients that do not take part in a task are not used in it.
    """

    name = "natural"
    by_owner = True

    def deal(
        self, labels: np.ndarray, owners: np.ndarray | None, clients: np.ndarray, rng: np.random.Generator
    ) -> Shares:
        """See :meth:`Partition.deal`."""
        if owners is None:
            valid = (
                "another one: the data do not tell whose the training samples are, as train_clients in the .npz of "
                "Arrays and Features, the column client of CsvTable, or folders <class>/<client>/ of ImageFolder, do"
            )
            raise ConfigError("data.partition", "Natural", valid)
        place = np.searchsorted(clients, owners)
        place[place == len(clients)] = 0
        return group_by_owner(np.where(clients[place] == owners, place, -1), len(clients))

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """Refuse to deal samples without owners; see :meth:`deal`.

        Raises:
            ConfigError: always.
        """
        return self.deal(labels, None, np.arange(num_clients), rng)


def check_owners(owners: Sequence[np.ndarray | None], num_clients: int) -> None:
    """Refuse a number of clients that differs from that in the data.

    Args:
        owners: per task, ``[N]`` the client of each sample; None if the data set does not say.
        num_clients: ``data.num_clients``.

    Raises:
        ConfigError: ``data.num_clients``.
    """
    known = [of_task for of_task in owners if of_task is not None and len(of_task)]
    if not known:
        return
    found = 1 + max(int(of_task.max()) for of_task in known)
    if found != num_clients:
        raise ConfigError("data.num_clients", num_clients, f"{found}, the clients whose samples the data hold")
