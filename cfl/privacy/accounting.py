"""Epsilon of several releases, by the library dp-accounting (extra ``privacy``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

from cfl.runtime.extras import install

Kind = Literal["pld", "rdp"]
INSTALL = install("privacy")
"""The command that installs the library."""
LARGEST = 1000.0
"""Epsilons above this one are always computed by Rényi divergences: so large an epsilon protects no client, and its
privacy loss distribution would take minutes."""
_FINENESS = 1e-3
"""Step of a privacy loss distribution's grid for one release, as a share of the epsilon to be found. The epsilon is too
large by less than that share, mostly by a hundredth of that share."""


@dataclass(frozen=True)
class Spent:
    """What was released about one client.

    Attributes:
        gaussian: sum of 1 / multiplier^2 over all releases that the client counts as part of. Several Gaussian releases
            are exactly as private as one whose squared inverse multiplier is this sum.
        sampled: (probability of taking part, multiplier) -> number of releases.
    """

    gaussian: float = 0.0
    sampled: Mapping[tuple[float, float], int] = field(default_factory=dict)


def is_installed() -> bool:
    """Whether this library is installed."""
    return find_spec("dp_accounting") is not None


@dataclass(frozen=True)
class Accountant:
    """Computes epsilon for a given delta.

    Attributes:
        delta: between 0 and 1.
        kind: ``pld``: by privacy loss distributions, an upper bound that is tight up to their grid, for epsilons up to
            :data:`LARGEST`. ``rdp``: by Rényi divergences, looser and faster.
    """

    delta: float = 1e-5
    kind: Kind = "pld"

    def epsilon(self, spent: Spent) -> float:
        """Upper bound of the epsilon with which all releases are (epsilon, delta) differentially private; 0 for none.

        Raises:
            ImportError: the library is not installed.
        """
        if not spent.gaussian and not spent.sampled:
            return 0.0
        return _epsilon(self.kind, self.delta, spent.gaussian, tuple(sorted(spent.sampled.items())))


@lru_cache(maxsize=4096)
def _epsilon(kind: Kind, delta: float, gaussian: float, sampled: tuple[tuple[tuple[float, float], int], ...]) -> float:
    import dp_accounting
    from dp_accounting import pld, rdp

    # Hides the library's warnings of Rényi orders that do not converge. It leaves these out, as intended.
    logging.getLogger("absl").setLevel(logging.ERROR)
    several: list[tuple[Any, int]] = []
    if gaussian:
        several.append((dp_accounting.GaussianDpEvent(1 / math.sqrt(gaussian)), 1))
    for (rate, multiplier), count in sampled:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        several.append((event, count))
    by_rdp = float(_composed(rdp.RdpAccountant(), several).get_epsilon(delta))
    if kind == "rdp" or by_rdp > LARGEST:
        return by_rdp
    # The library's own step, the same for all losses, takes up to a thousand times as long.
    step = max(1e-5, _FINENESS * by_rdp / math.sqrt(sum(count for _, count in several)))
    by_pld = float(_composed(pld.PLDAccountant(value_discretization_interval=step), several).get_epsilon(delta))
    return min(by_rdp, by_pld)  # both are upper bounds


def _composed(accountant: Any, several: list[tuple[Any, int]]) -> Any:
    for event, count in several:
        accountant.compose(event, count)
    return accountant
