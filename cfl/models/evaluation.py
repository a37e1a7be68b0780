"""Another mode of a network for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Dropout off and running statistics in use within the context; each module's own mode afterwards."""
    with _mode(network, False):
        yield


@contextmanager
def training_mode(network: nn.Module) -> Iterator[None]:
    """Every module trains within the context; each is in its own mode afterwards."""
    with _mode(network, True):
        yield


@contextmanager
def _mode(network: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
