"""Context managers that put a network into evaluation or training mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


def evaluation_mode(network: nn.Module) -> AbstractContextManager[None]:
    """Within the context the network is in evaluation mode; afterwards each module has its former mode."""
    return _mode(network, False)


def training_mode(network: nn.Module) -> AbstractContextManager[None]:
    """Within the context the network is in training mode; afterwards each module has its former mode."""
    return _mode(network, True)


@contextmanager
def _mode(network: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in network.modules()]
    network.train(training)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before
