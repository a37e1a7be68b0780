"""Blocks of a single class each."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner, shuffled_by_class
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers


class LabelBlocks(Partition):
    """Each client gets a few blocks of equal size; all samples of a block have one class.

    The samples of each class, in random order, are cut into blocks; the rest of a class is left out. Of all blocks,
    ``C * blocks_per_client`` are drawn at random and dealt at random, so a client's blocks may be of one class. All
    clients hold the same number of samples. Unlike :class:`~cfl.data.partitions.shards.Shards` no block straddles a
    border, whatever the class sizes.

    Source: FedCurv (Shoham et al., 2019), section 4: MNIST in 96 x 2 blocks of homogeneous labels, "discarding a small
    amount of data". The paper does not give the block size. The greatest one is 306: it gives 193 blocks, of which one
    is left out, and 612 samples per client.

    Args:
        blocks_per_client: blocks of each client, at least 1.
        block_size: samples in a block, at least 1; null: the greatest number with which there are enough blocks.

    Raises:
        ConfigError: ``data.partition.blocks_per_client`` or ``data.partition.block_size`` below 1.
    """

    def __init__(self, blocks_per_client: int = 2, block_size: int | None = None) -> None:
        check_integers("data.partition", 1, blocks_per_client=blocks_per_client)
        check_integers("data.partition", 1, or_null=True, block_size=block_size)
        self.blocks_per_client, self.block_size = blocks_per_client, block_size
        self.name = f"label-blocks-{blocks_per_client}"

    def check(self, num_samples: int, num_classes: int, num_clients: int) -> None:
        """See :meth:`Partition.check`; the samples must suffice for all blocks. :meth:`split` checks whether the
        classes do.
        """
        super().check(num_samples, num_classes, num_clients)
        needed = self.blocks_per_client * num_clients
        if needed > num_samples:
            raise ConfigError(
                "data.partition.blocks_per_client",
                self.blocks_per_client,
                f"at most {num_samples // num_clients}: {num_clients} clients share {num_samples} training samples "
                "and a block needs one",
            )
        if self.block_size is not None and self.block_size * needed > num_samples:
            self._refuse_size(num_samples // needed, f"{num_samples} training samples", needed)

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """See :meth:`Partition.split`.

        Raises:
            ConfigError: ``data.partition.block_size`` when the classes do not give enough blocks of that size.
        """
        class_sizes = np.unique_counts(labels).counts
        self.check(len(labels), len(class_sizes), num_clients)
        needed = self.blocks_per_client * num_clients
        greatest = greatest_block(class_sizes, needed)
        size = greatest if self.block_size is None else self.block_size
        if size > greatest:
            self._refuse_size(greatest, f"classes of {class_sizes.min()} to {class_sizes.max()} samples", needed)
        samples = shuffled_by_class(labels, rng)
        first_of_class = np.cumsum(class_sizes) - class_sizes
        first_of_block = np.concatenate(
            [first + size * np.arange(held // size) for first, held in zip(first_of_class, class_sizes, strict=True)]
        )
        dealt = rng.permutation(first_of_block)[:needed]
        owner = np.full(len(labels), -1)
        owner[samples[dealt[:, None] + np.arange(size)]] = np.arange(needed)[:, None] // self.blocks_per_client
        return group_by_owner(owner, num_clients)

    def _refuse_size(self, greatest: int, held: str, needed: int) -> None:
        raise ConfigError(
            "data.partition.block_size",
            self.block_size,
            f"at most {greatest}: of {held} there must be {needed} blocks of one class each; or null",
        )


def greatest_block(class_sizes: np.ndarray, needed: int) -> int:
    """The greatest block size with which classes of ``class_sizes`` give ``needed`` blocks; 0 if there is none."""
    sizes = range(1, int(class_sizes.max()) + 1)
    return bisect_left(sizes, True, key=lambda size: bool((class_sizes // size).sum() < needed))
