"""Networks that estimate the density of binary samples instead of classifying them."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.errors import ConfigError
from cfl.models.base import Network


class DensityNetwork(Network):
    """A network whose outputs are logits of its own input's D = C H W variables, each 0 or 1.

    A network of this kind is trained on the mean over samples of ``-log p(x)`` in nats, whatever the samples' labels
    are, and evaluated by that as well. It has no ``head``: no output belongs to a task.

    Args:
        input_shape: ``(C, H, W)`` of one sample.
        num_outputs: C H W, as ``data.scenario: density`` makes it.

    Raises:
        ConfigError: another number of outputs.
    """

    density: ClassVar[bool] = True

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.variables = self.input_shape[0] * self.input_shape[1] * self.input_shape[2]
        if num_outputs != self.variables:
            what = f"one with {num_outputs} network outputs"
            raise ConfigError("data.scenario", what, f"density with model.network {type(self).__name__}")

    @abstractmethod
    def log_likelihood(self, x: Tensor) -> Tensor:
        """``log p(x)`` ``[B]`` in nats of samples ``[B, C, H, W]``, each variable 0 or 1, in evaluation."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``[count, C, H, W]`` samples of the density, each variable 0 or 1."""


def is_density(network: nn.Module) -> bool:
    """Whether a network estimates a density."""
    return bool(getattr(network, "density", False))


def negative_log_likelihoods(logits: Tensor, x: Tensor) -> Tensor:
    """``-sum_d log p(x_d)`` in nats, ``[B]``, where ``p(x_d = 1)`` is the sigmoid of a logit.

    Args:
        logits: ``[B, D]``.
        x: ``[B, ...]``, D numbers each.
    """
    return F.binary_cross_entropy_with_logits(logits, x.flatten(1).to(logits.dtype), reduction="none").sum(1)


class LogLikelihood(nn.Module):
    """A density network's :meth:`DensityNetwork.log_likelihood` as a module, for ``functional_call``.

    Args:
        network: the density network; its tensors' names here begin with ``network.``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = network.training

    def forward(self, x: Tensor) -> Tensor:
        """Samples ``[B, C, H, W]`` to nats ``[B]``."""
        return self.network.log_likelihood(x)  # type: ignore[operator]
