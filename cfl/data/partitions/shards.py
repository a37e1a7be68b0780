"""Label-sorted shards."""

from __future__ import annotations

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner, shuffled_by_class
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers


class Shards(Partition):
    """Each client gets a few shards of the label-sorted samples, and so has few classes.

    The samples are sorted by class (in random order within a class) and cut into ``C * per_client`` shards of
    ``floor(N / (C * per_client))``; each client gets ``per_client`` different shards. A shard holds one class when the
    shard size divides the class sizes, otherwise it may straddle a border. The few samples that do not fill a shard
    are dropped at random, so that no class is thinned more than another.

    Source: McMahan et al. (AISTATS 2017), section 3; the non-IID settings of FOT (Bakman et al., ICLR 2024) and of
    Fed-A-GEM's MNIST tasks (Dai et al., 2024) have two shards per client.

    Args:
        per_client: shards of each client, at least 1.

    Raises:
        ConfigError: ``data.partition.per_client`` below 1.
    """

    def __init__(self, per_client: int = 2) -> None:
        check_integers("data.partition", 1, per_client=per_client)
        self.per_client = per_client
        self.name = f"shards-{per_client}"

    def check(self, num_samples: int, num_classes: int, num_clients: int) -> None:
        """See :meth:`Partition.check`; there must be a sample for every shard."""
        super().check(num_samples, num_classes, num_clients)
        if self.per_client * num_clients > num_samples:
            raise ConfigError(
                "data.partition.per_client",
                self.per_client,
                f"at most {num_samples // num_clients}: {num_clients} clients share {num_samples} training samples "
                "and a shard needs one",
            )

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """See :meth:`Partition.split`."""
        self.check(len(labels), len(np.unique(labels)), num_clients)
        num_shards = num_clients * self.per_client
        kept = rng.permutation(len(labels))[: len(labels) - len(labels) % num_shards]
        shards = kept[shuffled_by_class(labels[kept], rng)].reshape(num_shards, -1)
        client_of_shard = rng.permutation(np.repeat(np.arange(num_clients), self.per_client))
        owner = np.full(len(labels), -1)
        owner[shards] = client_of_shard[:, None]
        return group_by_owner(owner, num_clients)
