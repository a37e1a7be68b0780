"""GPSE by sketches (Bakman et al., ICLR 2024, eq 8 to 10): what a client sends of a layer, what the server reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.gpse_message import LayerOfClient
from cfl.methods.components.layer_inputs.sketch import LayerSketch
from cfl.methods.components.layer_inputs.spectrum import Spectrum
from cfl.methods.components.layer_inputs.workers_in_step import stream_of
from cfl.methods.components.subspace import principal_directions, project, residual_share
from cfl.randomness.generators import torch_generator


class SketchMessage:
    """``A_i = (X_i - O O^T X_i) G_i`` (eq 8, 9) as ``[d, s]`` float32, and two float64 scalars.

    Args:
        seed: of the experiment.
        multiples: ``conv`` and ``linear`` -> columns s of a sketch as a multiple of the layer's input dimension d.
        sharing: worker processes, at least 1, of which those with equally many clients draw the same Gaussian numbers
            (:func:`cfl.methods.components.layer_inputs.workers_in_step.stream_of`).
        scalars: ``energy``: summed squares of the inputs and of their part outside the basis; ``client_mean``: number
            of samples, and that number times the client's own share outside.
        mechanism: noise on the sketches, or None.
    """

    needs_bases = True
    without_noise = "numbers beside the noisy tensors"

    def __init__(
        self,
        seed: int,
        multiples: Mapping[str, float],
        sharing: int,
        scalars: Literal["energy", "client_mean"],
        mechanism: GaussianMechanism | None,
    ) -> None:
        self.seed, self.multiples, self.sharing = seed, multiples, sharing
        self.scalars, self.mechanism = scalars, mechanism

    def collector(self, layer: nn.Module, of: LayerOfClient) -> LayerSketch:
        """A sketch to which the layer's inputs are added."""
        columns = max(1, math.ceil(self.multiples["conv" if isinstance(layer, nn.Conv2d) else "linear"] * of.d))
        return LayerSketch(
            layer, of.with_bias, columns, of.basis, self._generator(of), of.samples * of.positions, self.sharing > 1
        )

    def sent(self, collector: LayerSketch, of: LayerOfClient) -> dict[str, Tensor]:
        """The sketch ``[1, d, s]`` under the layer's name and the scalars ``[1, 2]`` under ``<name> energies``."""
        a, *both = collector.finish()
        if self.mechanism is not None:
            noise = torch_generator(self.seed, "sketch noise", of.moment, of.client, of.number)
            a = self.mechanism.privatise(a, noise, of.clients)
        energies = torch.stack(both)
        if self.scalars == "client_mean":
            energies = energies.new_tensor([of.samples, of.samples * residual_share(energies[0], energies[1])])
        return {of.name: a[None], f"{of.name} energies": energies[None]}

    def spectrum(self, sums: Mapping[str, Tensor], name: str, d: int, basis: Tensor | None) -> Spectrum:
        """Left singular vectors and singular values of the summed sketch (eq 11), and rho."""
        a, energies = sums[name], sums[f"{name} energies"]
        if self.mechanism is not None:
            a = project(a.T, basis).T  # noise inside the basis does not describe the data
        if self.scalars == "client_mean":
            rho = float(energies[1] / energies[0])
        else:
            rho = residual_share(energies[0], energies[1])
        directions, values = principal_directions(a)
        return Spectrum(directions, values, rho, None, a.numel() * a.element_size())

    def _generator(self, of: LayerOfClient) -> torch.Generator:
        """The generator of a client's Gaussian numbers for a layer."""
        if self.sharing == 1:
            return torch_generator(self.seed, "sketch", of.moment, of.client, of.number)
        stream = stream_of(of.position, of.clients, self.sharing)
        return torch_generator(self.seed, "shared sketch", of.moment, stream, of.number)
