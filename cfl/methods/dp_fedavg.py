"""DP-FedAvg (McMahan et al., ICLR 2018), with a fixed or an adaptive bound (Andrew et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.schedule import RoundPlan
from cfl.federation.channel import UPDATE
from cfl.methods.base import Method, Report
from cfl.methods.context import Context
from cfl.privacy.release import Noise
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers

WITHIN = "updates within the bound"
"""Name under which clients send whether their updates are within the bound."""


class DPFedAvg(Method):
    """Bounds every client's update and adds Gaussian noise to the sum, for differential privacy of each client.

    A client scales its update down to the norm ``clip``, if it is longer. The server adds noise to the sum and divides
    by the expected number of clients, not by the number that took part::

        d_k <- d_k min(1, S / ||d_k||)
        d   <- (sum_k d_k + N(0, (z S)^2)) / m                               (McMahan et al., 2018, algorithm 1)

    with ``S``, the bound, ``z``, the noise multiplier, and ``m``, the expected number of clients: the paper's estimator
    with a fixed denominator, with weights of 1. With ``schedule.sampling: poisson`` a round may have no client; its
    model is moved by noise alone.

    **Per layer**: each of L layers, weight and bias together, has the bound ``clip / sqrt(L)``, so that the whole
    update has the bound ``clip``.

    **Adaptive bound** (``quantile``): the bound starts at ``clip``. A client also sends whether its update was within
    the bound, as 1/2 or -1/2, and the server moves the bound towards the quantile of the norms (Andrew et al., 2021)::

        b = (sum_k b_k + N(0, sigma_b^2)) / m + 1/2,   S <- S exp(-clip_lr (b - quantile))

    With ``schedule.client_dropout`` this ``m`` is the number of clients that do not drop out before their message,
    which does not depend on their data.

    The noise of the updates is then larger, such that both sums together have the noise multiplier ``z``. The noise
    multiplier of the updates is ``z' = (z^-2 - (2 sigma_b)^-2)^(-1/2)`` (theorem 1 there), with L layers
    ``(z^-2 - L (2 sigma_b)^-2)^(-1/2)``.

    The noise is drawn from a generator keyed by seed and round, so that runs can be repeated. A real federation must
    draw it from a source that others cannot predict.

    Differs from the papers: the guarantee is for what a client contributes to one task or to all of them
    (docs/privacy.md). Server momentum and methods that change the server's step are applied after the noise is added,
    and cost no privacy.

    Sends: with ``quantile`` one number per bound more, in the update. Extra memory per client: none between rounds.
    Extra compute: two passes over a client's update per round. Scenarios: all. Optimizers: any. Needs
    ``federated.client_weighting: uniform``, and ``federated.batchnorm`` other than ``average`` where the network has
    running statistics, which have no noise.

    Args:
        clip: bound of a client's update, above 0: the L2 norm of all parameters that clients and server exchange.
        noise_multiplier: standard deviation of the noise in the sum, divided by the bound, at least 0. With 0 bounded
            updates are averaged without noise, which gives no privacy guarantee.
        per_layer: bound every layer by itself instead of the update as a whole.
        quantile: share of the clients that are to be within the bound, in [0, 1]; null for a fixed bound.
        clip_lr: how fast the bound moves, above 0; with ``quantile`` only.
        count_noise: standard deviation sigma_b of the noise in the sum of ``b_k``, above 0; null for a twentieth of the
            expected clients of the first round, as in the paper, or as much as leaves ``z'`` within twice ``z``. With
            ``quantile`` and ``noise_multiplier`` above 0 only.

    Raises:
        ConfigError: for other values, an option that does nothing, tensors that would be sent without noise, or a
            ``count_noise`` that alone takes more than the noise multiplier allows; or for a network of less than
            32 bits per number.
    """

    scenarios = EVERY_SCENARIO
    task_free = True
    state = ("clips", "_rows")

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float = 1.0,
        per_layer: bool = False,
        quantile: float | None = None,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
    ) -> None:
        check_numbers("methods.dp_fedavg", "(0, inf)", clip=clip, clip_lr=clip_lr)
        check_numbers("methods.dp_fedavg", "[0, inf)", noise_multiplier=noise_multiplier)
        check_numbers("methods.dp_fedavg", "[0, 1]", or_null=True, quantile=quantile)
        check_numbers("methods.dp_fedavg", "(0, inf)", or_null=True, count_noise=count_noise)
        if quantile is None and clip_lr != 0.2:
            raise ConfigError("methods.dp_fedavg.clip_lr", clip_lr, "0.2 without methods.dp_fedavg.quantile")
        if count_noise is not None and (quantile is None or noise_multiplier == 0):
            valid = "null without methods.dp_fedavg.quantile, and with noise_multiplier = 0"
            raise ConfigError("methods.dp_fedavg.count_noise", count_noise, valid)
        self.clip, self.noise_multiplier, self.per_layer = clip, noise_multiplier, per_layer
        self.quantile, self.clip_lr, self.count_noise = quantile, clip_lr, count_noise
        self._rows: list[dict[str, Any]] = []

    def setup(self, context: Context) -> None:
        """Find the layers, and the noise of each sum."""
        super().setup(context)
        names = context.shared_parameters
        if not names:
            raise ConfigError(f"{self.key}.clip", self.clip, "no DPFedAvg where all parameters stay on their client")
        halves = {str(tensor.dtype) for tensor in context.shared_tensors().values() if tensor.itemsize < 4}
        if halves:  # the sum is rounded before the noise is added, which may change it by more than the bound
            valid = f"no DPFedAvg where clients exchange numbers of {min(halves)}: rounded sums exceed the bound"
            raise ConfigError(f"{self.key}.clip", self.clip, valid)
        if context.shared_buffers:
            valid = f"local or drop with {self.key}: running statistics would be averaged without noise"
            raise ConfigError("federated.batchnorm", context.batchnorm, valid)
        self.groups: dict[str, list[str]] = {}
        for name in names:
            self.groups.setdefault(name.rpartition(".")[0] if self.per_layer else "", []).append(name)
        bounds = len(self.groups)
        self.clips = torch.full((bounds,), self.clip / math.sqrt(bounds), dtype=torch.float64)
        z = self.noise_multiplier
        self._update_multiplier, self._count_noise = z, 0.0
        if self.quantile is not None and z > 0:
            least = z * math.sqrt(bounds) / 2
            usual = max(context.expected_clients(0) / 20, least * 2 / math.sqrt(3))
            self._count_noise = usual if self.count_noise is None else self.count_noise
            if self._count_noise <= least:
                valid = f"above {least:g}, half of noise_multiplier times the square root of {bounds} bounds, or null"
                raise ConfigError(f"{self.key}.count_noise", self.count_noise, valid)
            self._update_multiplier = (z**-2 - bounds * (2 * self._count_noise) ** -2) ** -0.5

    # The sum.

    def releases(self, plan: RoundPlan) -> dict[str, Noise]:
        """The noise in the sum of updates."""
        bound = float(self.clips.square().sum().sqrt())
        return {UPDATE: Noise(self.noise_multiplier, bound)} if self.noise_multiplier else {}

    def bounded_updates(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every client's update scaled down to the bound; with an adaptive bound, also whether it was within it."""
        sent = dict(updates)
        within = []
        for clip, names in zip(self.clips.tolist(), self.groups.values(), strict=True):
            rows_of = (updates[name] for name in names)
            squares = [rows.reshape(len(rows), -1).square().sum(1, dtype=torch.float64) for rows in rows_of]
            norms = torch.stack(squares).sum(0).sqrt()
            factors = (clip / norms).clamp(max=1.0)  # a norm of 0 gives infinity, which becomes 1
            for name in names:
                rows = updates[name]
                rows.mul_(factors.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1)))
            within.append((norms <= clip).float() - 0.5)
        if self.quantile is not None:
            sent[WITHIN] = torch.stack(within, 1)
        return sent

    def protected_mean(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The noisy sum divided by the expected number of clients. Also moves an adaptive bound."""
        expected = self.context.expected_clients(self.context.round)
        generator = torch_generator(self.context.seed, "update noise", self.context.round)
        updates = {name: total for name, total in sums.items() if name != WITHIN}
        scale = self._update_multiplier * math.sqrt(len(self.groups))
        for clip, names in zip(self.clips.tolist(), self.groups.values(), strict=True):
            for name in names:
                if scale:
                    updates[name].add_(_normal(updates[name], generator), alpha=scale * clip)
                updates[name].div_(expected)
        if self.quantile is not None:
            round = self.context.round
            dropped = set(self.context.channel.dropped_before_message(round))
            came = expected - len(dropped.intersection(self.context.plan(round).clients))
            self._move(self.quantile, sums.get(WITHIN), came, generator)
        return updates

    def _move(self, quantile: float, counts: Tensor | None, expected: float, generator: torch.Generator) -> None:
        """Move each bound towards the quantile, by the sum of the clients' ``b_k``; None if no client took part."""
        total = torch.zeros_like(self.clips) if counts is None else counts.to(self.clips)
        if self._count_noise:
            total = total + self._count_noise * _normal(total, generator)
        shares = total / expected + 0.5
        bound = float(self.clips.square().sum().sqrt())
        self._rows.append({"round": self.context.round, "clip": bound, "within": float(shares.mean())})
        self.clips = self.clips * torch.exp(-self.clip_lr * (shares - quantile))

    def report(self) -> Report:
        """With an adaptive bound, a row per round: the bound of the whole update, and the noisy share of clients within
        their bounds (mean over layers)."""
        return Report(rows=self._rows)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of a tensor's shape, drawn on the CPU, so that all devices get the same ones."""
    return torch.randn(like.shape, generator=generator).to(like)
