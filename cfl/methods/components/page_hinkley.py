"""The Page-Hinkley test: finds when a number that is observed again and again has risen."""

from __future__ import annotations

import math
import sys
from typing import Any

from cfl.methods import declared_state


class PageHinkley:
    """Sums how far values lie above their mean, in standard deviations, and finds a rise when the sum is large::

        z_t = (x_t - m) / max(s, floor |x_0|)
        g_t = max(0, g_(t-1) + z_t - tolerance)                a rise is found when g_t > threshold

    (Page, Biometrika 1954; g is the test's sum less its smallest value so far). The mean m and the variance s^2 are
    those of the values before x_t since the last rise, with weight 1/n for the n-th value and 1/window from the
    window-th on. The variance is the mean square of the rises from one value to the next, where falls count as 0. For
    values that differ by noise alone, this is their variance. Falling values, such as losses, do not add to it. ``x_0``
    is the first of all values that is not 0.

    Args:
        tolerance: standard deviations by which values may lie above the mean without adding to the sum.
        threshold: the sum above which a rise is found.
        window: number of values that mean and variance look back to.
        warm_up: values after the start, or after a rise, that only count for mean and variance.
        floor: the least standard deviation, as a share of ``x_0``.

    Attributes:
        since: moment of the first value of the present sum, or None if it is 0.
    """

    state = ("_sum", "since", "_count", "_mean", "_variance", "_last", "_first")

    def __init__(self, tolerance: float, threshold: float, window: int, warm_up: int, floor: float) -> None:
        self.tolerance, self.threshold = tolerance, threshold
        self.window, self.warm_up, self.floor = window, warm_up, floor
        self.since: int | None = None
        self._count = 0
        self._sum = 0.0
        self._mean = self._variance = self._last = self._first = 0.0

    def observe(self, value: float, moment: int) -> tuple[float, int | None]:
        """Take in the next value.

        Args:
            value: finite.
            moment: number of the value, such as the round.

        Returns:
            The statistic g, and, if a rise is found now, the moment in which it began, else None. After a rise, mean
            and variance start anew, with this value as the first one.
        """
        if self._first == 0.0:
            self._first = abs(value)
        statistic, found = 0.0, None
        if self._count >= self.warm_up:
            deviation = max(math.sqrt(self._variance), self.floor * self._first, sys.float_info.min)
            statistic = max(0.0, self._sum + (value - self._mean) / deviation - self.tolerance)
            if self._sum == 0.0 or statistic == 0.0:
                self.since = moment if statistic else None
            self._sum = statistic
            if statistic > self.threshold:
                found, self.since = self.since, None
                self._sum, self._count, self._mean, self._variance = 0.0, 0, 0.0, 0.0
        if self._count:
            rise = max(0.0, value - self._last)
            self._variance += (rise * rise - self._variance) / min(self._count, self.window)
        self._count += 1
        self._mean += (value - self._mean) / min(self._count, self.window)
        self._last = value
        return statistic, found

    def state_dict(self) -> dict[str, Any]:
        """The sum and the running mean and variance, for checkpoints."""
        return declared_state.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        declared_state.restore(self, state)
