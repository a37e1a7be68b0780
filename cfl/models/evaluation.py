"""Evaluating a network for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Dropout off and running statistics in use within the context; each module's own mode afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
