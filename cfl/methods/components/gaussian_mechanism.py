"""The Gaussian mechanism on clients' messages: clip, then add noise (FOT, Appendix H)."""

from __future__ import annotations

import logging
import math
from typing import Literal, get_args

import torch
from torch import Tensor

from cfl.privacy.release import Noise
from cfl.runtime.option_checks import check_choices, check_numbers

SigmaRule = Literal["paper", "standard"]

_log = logging.getLogger(__name__)


class GaussianMechanism:
    """Central (epsilon, delta) differential privacy for a sum over clients, by noise that the clients add.

    Each client clips its tensor to Frobenius norm ``clip`` and adds ``N(0, sigma^2)`` to every entry (FOT eq 14). Under
    secure aggregation the server sees only the sum over ``C`` clients, whose noise has variance ``C sigma^2``. The
    variance of each client's noise is therefore the required one divided by ``C``.

    The guarantee is for one released sum. Neighbouring data sets differ by adding or removing one client; replacing a
    client changes the sum by up to ``2 clip``. All ``C`` clients have to add their noise, and the server must see the
    sum only. Several layers and several tasks are several releases, whose losses add up. Other values that are sent,
    such as energies, are not protected. The classical proof holds for ``epsilon <= 1``; larger values are accepted, as
    in the paper (epsilon = 5), with a logged warning.

    Args:
        epsilon: privacy loss of one release, above 0.
        delta: probability that the loss is larger, above 0 and below 1.
        clip: largest Frobenius norm of a client's tensor, above 0, in the tensor's unit. The paper uses 1.
        sigma_rule: noise variance per client. ``paper``: ``log(1.25/delta) clip^2 / (epsilon^2 C)``, the bound in
            FOT's Appendix H (there for clip = 1, and with C as the number of all clients, whom its extraction asks).
            ``standard``: twice that, the Gaussian mechanism as usually proved (Dwork and Roth 2014, Theorem A.1,
            ``sigma^2 > 2 log(1.25/delta) clip^2 / epsilon^2``); the paper omits the factor 2, so ``paper`` reproduces
            its table but does not have its guarantee by that proof.

    Raises:
        ConfigError: a value outside its range.
    """

    def __init__(self, epsilon: float, delta: float, clip: float = 1.0, sigma_rule: SigmaRule = "standard") -> None:
        key = "methods.fot.mechanism"
        check_numbers(key, "(0, inf)", epsilon=epsilon)
        check_numbers(key, "(0, 1)", delta=delta)
        check_numbers(key, "(0, inf)", clip=clip)
        check_choices(key, get_args(SigmaRule), sigma_rule=sigma_rule)
        if epsilon > 1:
            _log.warning("%s.epsilon = %g: the noise bound is proved for epsilon <= 1 only", key, epsilon)
        self.epsilon, self.delta, self.clip = epsilon, delta, clip
        self.sigma_rule: SigmaRule = sigma_rule

    def sigma(self, num_clients: int) -> float:
        """Standard deviation of the noise that each of ``num_clients`` clients adds to every entry."""
        factor = 2.0 if self.sigma_rule == "standard" else 1.0
        return self.clip / self.epsilon * math.sqrt(factor * math.log(1.25 / self.delta) / num_clients)

    def noise(self, parts: int, whom: Literal["sampled", "all"], without: str) -> Noise:
        """The noise in the sum of all clients' messages, for the ledger (:mod:`cfl.privacy.ledger`).

        Args:
            parts: number of tensors of a message, each clipped and noised by itself.
            whom: clients that send.
            without: other parts of the messages that have no noise, in words; empty if there are none.
        """
        return Noise(self.sigma(1) / self.clip, self.clip, "clients", whom, parts, without)

    def clipped(self, a: Tensor) -> Tensor:
        """``a`` scaled down to Frobenius norm ``clip`` if it is longer: ``a / ||a|| * min(||a||, clip)``."""
        norm = torch.linalg.vector_norm(a, dtype=torch.float64)
        return a * (self.clip / norm).clamp(max=1.0).to(a.dtype)  # a norm of 0 gives infinity, which becomes 1

    def privatise(self, a: Tensor, generator: torch.Generator, num_clients: int) -> Tensor:
        """One client's message for one layer: ``a`` clipped, plus its share of the noise.

        Args:
            a: ``[d, s]`` (any shape works), one layer's sketch; unchanged.
            generator: this client's, layer's and task's own. The draws are float32 on its device.
            num_clients: ``C``, clients whose tensors are summed.

        Returns:
            A new tensor of ``a``'s shape, dtype and device.
        """
        noise = torch.randn(a.shape, generator=generator, device=generator.device).to(a)
        return self.clipped(a).add_(noise, alpha=self.sigma(num_clients))
