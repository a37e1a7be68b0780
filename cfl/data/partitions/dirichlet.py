"""Class proportions from a Dirichlet distribution."""

from __future__ import annotations

import numpy as np

from cfl.data.partitions.base import Partition, group_by_owner, shuffled_by_class
from cfl.data.partitions.client_shares import Shares
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers, check_numbers

_HOPELESS = 200
"""Number of clients with too few samples after one draw at which further draws are hopeless.

Clients have too few samples independently of each other or with negative correlation: proportions are negatively
associated (Joag-Dev and Proschan, 1983). If a draw left m clients short on average, it would leave no client short with
probability below exp(-m), and for m < 60 it would leave 200 short with probability below exp(-100).
"""
_MOST_RETRIES = 100_000
"""Greatest number of draws, which take about ten seconds."""


class Dirichlet(Partition):
    """Each class is divided over the clients in proportions drawn from Dir(alpha, ..., alpha).

    Small ``alpha`` concentrates a class on few clients; large ``alpha`` approaches equal shares. Classes are dealt in
    ascending order. With ``balance`` a client that already holds its average share ``N / C`` gets nothing of the
    following classes: its proportion is set to 0 and the others are renormalised. The whole partition is redrawn until
    every client holds ``min_samples``. If a draw leaves 200 clients or more with too few, the search ends with an
    error. All samples are dealt; client sizes differ.

    Source: Yurochkin et al. (ICML 2019) for the class-wise draw; balancing and redrawing as in Fed-A-GEM's code
    (Dai et al., 2024), which uses alpha 0.3 and 10 samples.

    Args:
        alpha: concentration, above 0.
        min_samples: fewest samples a client may hold in a task, at least 0.
        max_retries: draws before giving up, from 1 to 100,000.
        balance: whether clients stop receiving at the average share.

    Raises:
        ConfigError: ``data.partition.alpha``, ``.min_samples`` or ``.max_retries`` out of range.
    """

    def __init__(self, alpha: float = 0.3, min_samples: int = 10, max_retries: int = 100, balance: bool = True) -> None:
        check_numbers("data.partition", "(0, inf)", alpha=alpha)
        check_integers("data.partition", 0, min_samples=min_samples)
        check_integers("data.partition", 1, at_most=_MOST_RETRIES, max_retries=max_retries)
        self.alpha, self.min_samples, self.max_retries, self.balance = alpha, min_samples, max_retries, balance
        self.name = f"dirichlet-{alpha:g}"

    def check(self, num_samples: int, num_classes: int, num_clients: int) -> None:
        """See :meth:`Partition.check`; the samples must suffice for ``min_samples`` each."""
        super().check(num_samples, num_classes, num_clients)
        if self.min_samples * num_clients > num_samples:
            raise ConfigError(
                "data.partition.min_samples",
                self.min_samples,
                f"at most {num_samples // num_clients}: {num_clients} clients share {num_samples} training samples",
            )

    def split(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> Shares:
        """See :meth:`Partition.split`.

        Raises:
            ConfigError: ``data.partition.alpha`` when no draw gave every client ``min_samples``; the message says how
                many samples the smallest client had in the best draw.
        """
        class_sizes = np.unique_counts(labels).counts
        self.check(len(labels), len(class_sizes), num_clients)
        best, draws, short = -1, 0, num_clients
        while short and draws < self.max_retries:
            counts = self._draw_counts(class_sizes, num_clients, rng)
            held, draws = counts.sum(axis=0), draws + 1
            best, short = max(best, int(held.min())), int((held < self.min_samples).sum())
            if short >= _HOPELESS:
                break
        if short:
            raise ConfigError(
                "data.partition.alpha",
                self.alpha,
                f"a value with which every client gets data.partition.min_samples = {self.min_samples} of "
                f"{len(labels)} training samples; in {draws} draw{'s' * (draws > 1)} over {num_clients} clients (the "
                f"last left {short} of them short) the smallest client had at most {best}: raise alpha, lower "
                f"min_samples to {best}, or use fewer clients",
            )
        owner = np.empty(len(labels), dtype=np.int64)
        owner[shuffled_by_class(labels, rng)] = np.repeat(
            np.tile(np.arange(num_clients), len(class_sizes)), counts.ravel()
        )
        return group_by_owner(owner, num_clients)

    def _draw_counts(self, class_sizes: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Samples of each class for each client, ``[classes, clients]`` int64, rows summing to ``class_sizes``."""
        total = int(class_sizes.sum())
        counts = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
        held = np.zeros(num_clients, dtype=np.int64)
        receiving = np.arange(num_clients)
        for row, size in zip(counts, class_sizes, strict=True):
            if self.balance:
                receiving = np.flatnonzero(held * num_clients < total)
            # Zeroing some entries of a symmetric Dirichlet and renormalising leaves a symmetric Dirichlet over the
            # others; drawing that directly avoids 0 / 0 when the full clients drew all the mass.
            proportions = rng.dirichlet(np.full(len(receiving), self.alpha))
            ends = np.floor(np.cumsum(proportions) * size).astype(np.int64)
            ends[-1] = size  # the cumulative sum may end a rounding error below 1
            row[receiving] = np.diff(ends, prepend=0)
            held += row
        return counts
