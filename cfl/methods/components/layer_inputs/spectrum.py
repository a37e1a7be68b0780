"""The principal directions of a layer's inputs that FOT's server computes after a task."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Spectrum(NamedTuple):
    """Principal directions of a task's inputs outside the basis of earlier tasks.

    Attributes:
        directions: ``[d, m]``, orthonormal, the largest first.
        values: ``[m]`` singular values of the directions, up to a factor that they share.
        rho: residual share of the inputs, see :func:`cfl.methods.components.subspace.residual_share`.
        moments: ``[d, d]`` second moments of all inputs, float64, if the server knows them.
        message_bytes: of one client's message for the layer.
    """

    directions: Tensor
    values: Tensor
    rho: float
    moments: Tensor | None
    message_bytes: int
