"""Settings of secure sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

Aggregation = Literal["plain", "modelled", "secure"]
INSTALL = "pip install 'continual-fl[secure]'"
"""The command that installs the library of the protocol's primitives."""


def is_installed() -> bool:
    """Whether the library is there."""
    return find_spec("cryptography") is not None


@dataclass(frozen=True)
class SumSettings:
    """How sums of integers are formed.

    Attributes:
        secure: whether the protocol runs; else its outcome is computed.
        seed: of the run.
        neighbours: of each client, even; None for all others.
        threshold: share of the holders of a client's secrets, more than which are needed to recover them.
        codecs: topic -> options that take the place of its codec's defaults.
        stage: before which clients that drop out do so.
        greatest_weight: topic -> the greatest weight of its messages, where that is not 1.
    """

    secure: bool
    seed: int
    neighbours: int | None = None
    threshold: float = 0.5
    codecs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stage: str = "message"
    greatest_weight: Callable[[str], float] = lambda topic: 1.0
