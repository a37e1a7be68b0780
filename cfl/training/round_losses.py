"""The training losses of a round's clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch


class RoundLosses:
    """Sums of losses per client, so that a round's mean does not depend on how clients were grouped in cohorts.

    Sums stay on the device, so that no step waits for them. Only reading them waits.

    Args:
        known: client -> sum and number of its finite losses.
    """

    def __init__(self, known: Mapping[int, tuple[float, float]] | None = None) -> None:
        self._known = dict(known or {})
        self._cohorts: list[tuple[tuple[int, ...], Tensor]] = []
        self._mean: float | None = None

    def open(self, clients: tuple[int, ...], device: torch.device) -> None:
        """Start a cohort; the losses that are added next belong to its clients."""
        self._cohorts.append((clients, torch.zeros(2, len(clients), device=device)))
        self._mean = None

    def add(self, losses: Tensor, batch: CohortBatch) -> None:
        """Add the clients' losses ``[k]`` of a step, except those that are not finite or of clients without samples."""
        if not len(losses):
            return
        counted = losses.isfinite()  # who trains to NaN is left out, or the run stops
        if batch.padded:
            counted &= torch.any(batch.mask, dim=1)
        _, sums = self._cohorts[-1]
        sums += torch.stack([torch.where(counted, losses, 0.0), counted.to(losses.dtype)])
        self._mean = None

    @property
    def of_clients(self) -> dict[int, tuple[float, float]]:
        """Client -> sum and number of its finite losses. Waits for the device."""
        if self._cohorts:
            sums = torch.cat([sums for _, sums in self._cohorts], 1).tolist()
            clients = [client for clients, _ in self._cohorts for client in clients]
            self._known |= dict(zip(clients, zip(*sums, strict=True), strict=True))
        return self._known

    @property
    def mean(self) -> float:
        """Mean of the finite losses of all clients' steps; NaN without any. Waits for the device once."""
        if self._mean is None:
            found = self.of_clients
            total, count = (sum(found[client][k] for client in sorted(found)) for k in (0, 1))
            self._mean = total / count if count else math.nan
        return self._mean
