"""GPSE by second moments: what a client sends of a layer instead of a sketch, and what the server reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.covariance import InputCovariance, covariance_outside
from cfl.methods.components.layer_inputs.gpse_message import LayerOfClient
from cfl.methods.components.layer_inputs.packed import pack, unpack
from cfl.methods.components.layer_inputs.spectrum import Spectrum
from cfl.methods.components.subspace import residual_share, with_fixed_signs

# Float32 rounding of a sum of second moments: errors of its eigenvalues, relative to its Frobenius norm.
_ROUNDING = 2**-24


class CovarianceMessage:
    """A client's second moments ``C_i = X_i X_i^T`` of a layer's inputs: the ``d (d + 1) / 2`` numbers of a triangle.

    A sketch ``A = X* G`` with s columns has ``E[A A^T] = s X* X*^T``: second moments are what a sketch of infinitely
    many columns gives, up to the factor s. They take ``(d + 1) / (2 s)`` of its numbers: a tenth for ``s = 5 d``.

    The raw moments are sent, in float32, and the server computes ``(I - O O^T) C (I - O O^T)`` in float64. So clients
    need no basis, and the share rho and the importance of old directions follow from the same message, without the
    scalars that go with a sketch. Rounding hides directions with less than 6e-8 of the matrix's Frobenius norm:
    eigenvalues below that are taken as 0. Thresholds up to 0.9999 do not need them.

    With ``mechanism``, the triangle is clipped in the matrix's Frobenius norm and every number of it gets noise
    (:func:`cfl.methods.components.layer_inputs.packed.pack`). All that is sent of the inputs is then noisy, rho
    included. Noise of standard deviation s alone has eigenvalues up to ``s sqrt(2 d)`` (Wigner's semicircle law; the
    numbers beside the diagonal have s / sqrt(2)). Only directions with larger eigenvalues count. Others would protect
    only noise, and would use up dimensions that later tasks need.

    Args:
        mechanism: noise on the moments, or None.
    """

    needs_bases = False
    without_noise = ""

    def __init__(self, mechanism: GaussianMechanism | None) -> None:
        self.mechanism = mechanism

    def collector(self, layer: nn.Module, of: LayerOfClient) -> InputCovariance:
        """Second moments to which the layer's inputs are added."""
        return InputCovariance(layer, of.with_bias, next(layer.parameters()).device, torch.float32)

    def sent(self, collector: InputCovariance, of: LayerOfClient) -> dict[str, Tensor]:
        """The packed moments ``[1, d (d + 1) / 2]`` under the layer's name."""
        packed = pack(collector.lower())
        if self.mechanism is not None:
            packed = self.mechanism.privatise(packed, of.generator("covariance noise"), of.clients)
        return {of.name: packed[None]}

    def spectrum(self, sums: Mapping[str, Tensor], name: str, d: int, basis: Tensor | None) -> Spectrum:
        """Eigenvectors of the moments outside the basis, roots of the eigenvalues, and rho; float64."""
        moments = unpack(sums[name], d)
        noise = 0.0 if self.mechanism is None else self.mechanism.sigma(1) * math.sqrt(2 * d)
        energies, directions = torch.linalg.eigh(covariance_outside(moments, basis))
        if noise:
            moments = _above(moments, noise)
        floor = max(noise, _ROUNDING * float(torch.linalg.matrix_norm(moments)))
        values = torch.where(energies > floor, energies, 0).flip(0).sqrt()
        rho = residual_share(moments.trace(), values.square().sum())
        directions = with_fixed_signs(directions.flip(1))
        return Spectrum(directions, values, rho, moments, sums[name].numel() * sums[name].element_size())


def _above(matrix: Tensor, floor: float) -> Tensor:
    """A symmetric matrix without its eigenvalues up to ``floor``."""
    energies, directions = torch.linalg.eigh(matrix)
    return (directions * torch.where(energies > floor, energies, 0)) @ directions.T
