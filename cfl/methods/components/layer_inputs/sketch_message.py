"""GPSE by sketches (Bakman et al., ICLR 2024, eq 8 to 10): what a client sends of a layer, what the server reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.methods.components.layer_inputs.gpse_message import LayerOfClient
from cfl.methods.components.layer_inputs.sketch import LayerSketch
from cfl.methods.components.layer_inputs.spectrum import Spectrum
from cfl.methods.components.layer_inputs.workers_in_step import stream_of
from cfl.methods.components.subspace import principal_directions, project, residual_share
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers

ResidualShare = Literal["energy", "client_mean"]


class SketchMessage:
    """Sends the sketch ``A_i = (X_i - O O^T X_i) G_i`` (eq 8, 9) as ``[d, s]`` float32, and two float64 scalars.

    Args:
        key: of the method's options, for errors.
        sketch_size: columns s of a sketch as a multiple of the layer's input dimension d, in (0, 1000]; or one multiple
            each for the kinds ``conv`` and ``linear``; None: 5.
        sketch_sharing: worker processes, at least 1, of which those with equally many clients draw the same Gaussian
            numbers (:func:`cfl.methods.components.layer_inputs.workers_in_step.stream_of`).
        residual_share: decides the scalars. ``energy``: summed squares of the inputs and of their part outside the
            basis; ``client_mean``: number of samples, and that number times the client's own share outside.
        mechanism: noise on the sketches, or None.

    Raises:
        ConfigError: for other values.
    """

    needs_bases = True
    without_noise = "numbers beside the noisy tensors"

    def __init__(
        self,
        key: str,
        sketch_size: float | Mapping[str, float] | None,
        sketch_sharing: int,
        residual_share: ResidualShare,
        mechanism: GaussianMechanism | None,
    ) -> None:
        size = 5.0 if sketch_size is None else sketch_size
        multiples = size if isinstance(size, Mapping) else {"conv": size, "linear": size}
        if set(multiples) != {"conv", "linear"} or not all(0 < multiple <= 1000 for multiple in multiples.values()):
            valid = "a number in (0, 1000], or {conv: number, linear: number}"
            raise ConfigError(f"{key}.sketch_size", sketch_size, valid)
        check_integers(key, 1, sketch_sharing=sketch_sharing)
        check_choices(key, get_args(ResidualShare), residual_share=residual_share)
        self.multiples, self.sharing = multiples, sketch_sharing
        self.scalars, self.mechanism = residual_share, mechanism

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
            a = self.mechanism.privatise(a, of.generator("sketch noise"), of.clients)
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
            return of.generator("sketch")
        stream = stream_of(of.position, of.clients, self.sharing)
        return torch_generator(of.seed, "shared sketch", of.moment, stream, of.number)
