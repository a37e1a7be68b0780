"""Settings of secure sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from cfl.runtime.extras import install

Aggregation = Literal["plain", "modelled", "secure"]
INSTALL = install("secure")
"""The command that installs the library of the protocol's primitives."""


def is_installed() -> bool:
    """Whether this library is installed."""
    return find_spec("cryptography") is not None


@dataclass(frozen=True)
class SumSettings:
    """How sums of integers are formed.

    Attributes:
        secure: whether the protocol runs; else its outcome is computed without it.
        seed: seed of the run.
        neighbours: number of neighbours of each client, even; None for all others.
        threshold: more than this share of the holders of a client's secrets is needed to recover them.
        codecs: topic -> options that replace those of its default codec.
        stage: stage before which clients drop out.
        greatest_weight: takes a topic and returns the greatest weight of its messages.
    """

    secure: bool
    seed: int
    neighbours: int | None = None
    threshold: float = 0.5
    codecs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stage: str = "message"
    greatest_weight: Callable[[str], float] = lambda topic: 1.0
