"""Equal shares at random."""

from __future__ import annotations

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner
from cfl.data.partitions.client_shares import Shares


class IID(Partition):
    """Every client draws from the same distribution: the samples are shuffled and cut into equal shares.

    Source: FOT's code (Bakman et al., ICLR 2024) cuts shares of ``floor(N / C)``.

    Args:
        keep_remainder: False drops the ``N mod C`` samples that remain, so that all clients hold the same number;
            True spreads them, one each.
    """

    name = "iid"

    def __init__(self, keep_remainder: bool = False) -> None:
        self.keep_remainder = keep_remainder

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """See :meth:`Partition.split`."""
        self.check(len(labels), len(np.unique(labels)), num_clients)
        order = rng.permutation(len(labels))
        dealt = len(order) - (0 if self.keep_remainder else len(order) % num_clients)
        owner = np.full(len(order), -1)
        owner[order[:dealt]] = np.arange(dealt) * num_clients // dealt
        return group_by_owner(owner, num_clients)
