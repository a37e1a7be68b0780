"""Means over seeds, paired differences on common seeds, and ranks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cfl.reporting.rounding import rounded

LEVEL = 0.95
"""Level of the confidence intervals."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of some values.

    Attributes:
        mean: ``m = sum x / n``.
        std: the sample standard deviation ``sqrt(sum (x - m)^2 / (n - 1))``; None for a single value.
        count: n, at least 1.
    """

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return mean and spread of finite values; None without values."""
        if not values:
            return None
        mean, count = math.fsum(values) / len(values), len(values)
        if count == 1:
            return cls(mean, None, 1)
        return cls(mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1)), count)

    def shown(self, decimals: int, style: str = "", divisor: float = 1.0) -> str:
        """Return mean and deviation as text, ``81.25 ± 0.40``, without deviation for a single value.

        Args:
            decimals: digits behind the point.
            style: style of the mean, as in :func:`cfl.reporting.rounding.rounded`.
            divisor: both numbers are divided by it, 1e6 for bytes in MB.
        """
        mean = rounded(self.mean / divisor, decimals, style)
        return mean if self.std is None else f"{mean} ± {rounded(self.std / divisor, decimals, style.lstrip('+'))}"


@dataclass(frozen=True)
class Difference:
    """How much larger one row is than another, seed by seed.

    Attributes:
        mean: mean of the differences on common seeds.
        low: lower end of the confidence interval of the mean difference; None for a single seed.
        high: its upper end.
        count: number of common seeds, at least 1.
    """

    mean: float
    low: float | None
    high: float | None
    count: int


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Mean of ``d_s = ours_s - theirs_s`` over the seeds s that both have, with Student's t interval.

    The interval of :data:`LEVEL`, ``d +- t_{(1 + level) / 2, n - 1} std(d) / sqrt(n)``, assumes normal differences.
    Runs of one seed share data, partition and sampled clients, so the interval is usually narrower than for unpaired
    runs.

    Args:
        ours: seed -> value.
        theirs: seed -> value.

    Returns:
        None if there is no common seed.
    """
    common = sorted(ours.keys() & theirs.keys())
    spread = Spread.of([ours[seed] - theirs[seed] for seed in common])
    if spread is None:
        return None
    if spread.std is None:
        return Difference(spread.mean, None, None, 1)
    from scipy.special import stdtrit  # takes a second to import; single runs do not need it

    half = float(stdtrit(spread.count - 1, (1 + LEVEL) / 2)) * spread.std / math.sqrt(spread.count)
    return Difference(spread.mean, spread.mean - half, spread.mean + half, spread.count)


def mean_ranks(rows: Sequence[Mapping[int, float]], higher_is_better: bool) -> list[float] | None:
    """Each row's rank, 1 the best, averaged over the seeds that all rows have; equal values share their mean rank.

    Args:
        rows: for each row, seed -> value.
        higher_is_better: whether rank 1 belongs to the highest value.

    Returns:
        A rank per row, None where no seed is common to all.
    """
    common = set.intersection(*(set(row) for row in rows)) if rows else set()
    if not common:
        return None
    sign = -1.0 if higher_is_better else 1.0
    of_seeds = [ranks([sign * row[seed] for row in rows]) for seed in common]
    return [sum(of_row) / len(common) for of_row in zip(*of_seeds, strict=True)]


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, 1 the lowest; equal values share their mean rank."""
    ascending = sorted(values)
    return [(bisect_left(ascending, value) + bisect_right(ascending, value) + 1) / 2 for value in values]
