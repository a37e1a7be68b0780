"""A fixed number of classes per client."""

from __future__ import annotations

import math

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner, shuffled_by_class
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers

_DRAWS_AT_ONCE = 1 << 20


class ClassesPerClient(Partition):
    """Each client holds exactly ``num_classes`` classes; each class is spread evenly over the clients that hold it.

    Clients choose among the classes with the fewest holders so far, ties at random: the numbers of holders differ by
    at most one, every class has a holder, and all samples are dealt. The shares of one class differ by at most one
    sample.

    Args:
        num_classes: classes of each client, at least 1.

    Raises:
        ConfigError: ``data.partition.num_classes`` below 1.
    """

    def __init__(self, num_classes: int = 2) -> None:
        check_integers("data.partition", 1, num_classes=num_classes)
        self.num_classes = num_classes
        self.name = f"classes-{num_classes}"

    def check(self, num_samples: int, num_classes: int, num_clients: int) -> None:
        """See :meth:`Partition.check`; no client can hold more classes than exist, and each class needs a client."""
        super().check(num_samples, num_classes, num_clients)
        if self.num_classes > num_classes:
            self._refuse(f"at most {num_classes}, the number of classes in the task")
        if self.num_classes * num_clients < num_classes:
            self._refuse(f"at least {-(-num_classes // num_clients)}, or {num_clients} clients leave a class unheld")
        if self.num_classes * num_clients > num_samples:
            self._refuse(f"at most {num_samples // num_clients}: {num_clients} clients share {num_samples} samples")

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """See :meth:`Partition.split`.

        Raises:
            ConfigError: ``data.partition.num_classes`` when a class has fewer samples than holders.
        """
        classes, position, sizes = np.unique(labels, return_inverse=True, return_counts=True)
        self.check(len(labels), len(classes), num_clients)
        chosen = self._choose_classes(len(classes), num_clients, rng).ravel()
        num_holders = np.bincount(chosen, minlength=len(classes))
        if (short := np.flatnonzero(sizes < num_holders)).size:
            k = short[0]
            self._refuse(f"fewer: class {classes[k]} has {sizes[k]} samples for {num_holders[k]} clients")
        # Holders in random order, because the first of them get the one sample that an uneven share leaves over.
        holders = shuffled_by_class(chosen, rng) // self.num_classes
        first_holder = np.cumsum(num_holders) - num_holders
        first_sample = np.cumsum(sizes) - sizes
        samples = shuffled_by_class(position, rng)
        k = position[samples]
        rank = np.arange(len(labels)) - first_sample[k]
        owner = np.empty(len(labels), dtype=np.int64)
        owner[samples] = holders[first_holder[k] + rank % num_holders[k]]
        return group_by_owner(owner, num_clients)

    def _choose_classes(self, total: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Distinct class positions of each client, ``[clients, num_classes]`` int64."""
        chosen = np.empty((num_clients, self.num_classes), dtype=np.int64)
        # After a block of clients all classes have equally many holders again, whatever was chosen: client i of every
        # block can choose at the same time.
        block = total // math.gcd(total, self.num_classes)
        at_once = block * max(1, _DRAWS_AT_ONCE // (block * total))
        for first in range(0, num_clients, at_once):
            draws = rng.random((min(at_once, num_clients - first), total))
            before = np.arange(first, first + len(draws), block) * self.num_classes // total
            num_holders = np.repeat(before[:, None].astype(float), total, axis=1)
            for i in range(min(block, len(draws))):
                ties = draws[i::block]
                held = num_holders[: len(ties)]
                picked = np.argpartition(held + ties, self.num_classes - 1, axis=1)[:, : self.num_classes]
                held[np.arange(len(ties))[:, None], picked] += 1
                chosen[first + i : first + len(draws) : block] = picked
        return chosen

    def _refuse(self, valid: str) -> None:
        raise ConfigError("data.partition.num_classes", self.num_classes, valid)
