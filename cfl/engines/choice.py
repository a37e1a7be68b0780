"""One way to compute local steps: engine, width, threads and layout; and the engine that is built for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from cfl.engines.base import Engine, EngineKind, EngineOptions
from cfl.engines.products import Library, products_of
from cfl.engines.vmapped import VmapEngine
from cfl.engines.workers import WorkerEngine


@dataclass(frozen=True)
class EngineChoice:
    """One way to compute local steps.

    Attributes:
        kind: engine.
        width: clients trained side by side, K.
        threads: clients computed at the same time by ``workers``, one math thread each; 0 computes one client after
            another with all math threads. 0 for ``vmap``.
        stack: clients that a thread computes together.
        batch_last: whether ``workers`` hold maps with the batch last in memory.
        products: library that multiplies matrices in hand-written steps of ``workers``.
    """

    kind: EngineKind
    width: int
    threads: int = 0
    stack: int = 1
    batch_last: bool = False
    products: Library = "blas"

    @property
    def most_padding(self) -> float | None:
        """Share of computed samples that may be padding: 10 %, or None for an engine that computes none."""
        return 0.1 if self.kind == "vmap" or self.stack > 1 else None

    @property
    def at_once(self) -> int:
        """Number of clients that ``workers`` compute at the same time, while others of the cohort wait; else 1."""
        return max(self.threads, 1) * self.stack if self.kind == "workers" else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records and checkpoints."""
        return asdict(self)

    def __str__(self) -> str:
        if self.kind == "vmap":
            return f"vmap, K = {self.width}"
        stacked = f", {self.stack} clients stacked" if self.stack > 1 else ""
        who = f"{self.threads} worker(s)" if self.threads else "1 worker with all math threads"
        layout = ", batch last" if self.batch_last else ""
        return f"{who}, K = {self.width}{stacked}{layout}{', oneDNN' if self.products == 'onednn' else ''}"


def build_engine(
    choice: EngineChoice,
    network: nn.Module,
    input_shape: tuple[int, int, int],
    options: EngineOptions,
    batch_size: int,
    eager: bool = False,
    by_hand: bool = True,
) -> Engine:
    """Build the engine of a choice, for batches of ``batch_size``; see :class:`~cfl.engines.workers.WorkerEngine`."""
    if choice.kind == "workers":
        threads, stack, last = choice.threads, choice.stack, choice.batch_last
        products = products_of(choice.products, batch_size)
        return WorkerEngine(network, input_shape, threads, stack, last, eager, by_hand, products)
    return VmapEngine(network, input_shape, options.compile, eager)


def from_dict(saved: dict[str, Any] | None, allowed: Sequence[EngineChoice]) -> EngineChoice | None:
    """Restore a choice from :meth:`EngineChoice.to_dict`; None if it is not among the allowed ones."""
    if saved is None:
        return None
    try:
        choice = EngineChoice(**saved)
    except TypeError:  # of another version
        return None
    return choice if choice in allowed else None
