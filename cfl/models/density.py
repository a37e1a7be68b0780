"""Networks that estimate the density of binary samples instead of classifying them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from cfl.models.base import Network
from cfl.runtime.errors import ConfigError


class DensityNetwork(Network):
    """A network whose outputs are the logits of the D = C H W variables of its input, each 0 or 1.

    It is trained and evaluated by the mean over samples of ``-log p(x)`` in nats; labels are not used. It has no
    ``head``: no output belongs to a task.

    Args:
        input_shape: ``(C, H, W)`` of one sample.
        num_outputs: C H W, as set by ``data.scenario: density``.

    Raises:
        ConfigError: another number of outputs.
    """

    predicts: ClassVar[str] = "density"

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.variables = self.input_shape[0] * self.input_shape[1] * self.input_shape[2]
        if num_outputs != self.variables:
            name, outputs = type(self).__name__, self.variables
            valid = f"a network with labels, or data.scenario density: there are {num_outputs} outputs, not {outputs}"
            raise ConfigError("model.network", name, valid)

    @property
    def differs_by_client(self) -> bool:
        """Whether the same weights give another density at every client."""
        return False

    @abstractmethod
    def log_likelihood(self, x: Tensor, clients: Sequence[int] = (0,)) -> Tensor:
        """``log p(x)`` ``[B]`` in nats of samples ``[B, C, H, W]``, each variable 0 or 1, in evaluation.

        Args:
            x: the samples.
            clients: if densities differ by client, the clients over whose ``log p(x)`` the mean is taken.
        """

    def answers(self, x: Tensor, clients: Sequence[int] = (0,)) -> Tensor:
        """Return :meth:`log_likelihood`."""
        return self.log_likelihood(x, clients)

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None, client: int = 0) -> Tensor:
        """``[count, C, H, W]`` samples of the density, each variable 0 or 1; ``client`` matters if densities differ."""


def is_density(network: nn.Module) -> bool:
    """Whether a network estimates a density."""
    return getattr(network, "predicts", None) == DensityNetwork.predicts


def densities_differ(network: nn.Module) -> bool:
    """Whether the same weights give another density at every client."""
    return is_density(network) and bool(network.differs_by_client)
