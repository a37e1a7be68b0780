"""One client's sketch of one layer's inputs, computed in the cheaper of two ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.covariance import InputCovariance, covariance_is_cheaper, draw_sketch
from cfl.methods.components.subspace import Sketch, layer_dim, layer_inputs, sketch_rows


class LayerSketch:
    """Computes ``A = X* G`` (FOT eq 8, 9), either piece by piece (:class:`cfl.methods.components.subspace.Sketch`) or
    from the covariance.

    Both ways have the same distribution (:func:`cfl.methods.components.layer_inputs.covariance.draw_sketch`). The
    choice depends on layer, ``rows`` and ``columns`` only. It is the same on every machine and device. Draws from the
    covariance do not depend on the batch size; those piece by piece may. With many more rows than dimensions, as for
    convolutions, the covariance is several times cheaper.

    Args:
        layer: see :func:`cfl.methods.components.subspace.layer_dim`.
        with_bias: whether 1 is appended to its inputs.
        columns: s.
        basis: ``[d, k]`` of earlier tasks' inputs, on the layer's device, or None.
        generator: one per client, layer and task, on the CPU, so that the draws are the same on every device.
        rows: number of inputs that will be added.
        shared: whether other clients draw the same numbers, which is possible piece by piece only.
    """

    def __init__(
        self,
        layer: nn.Module,
        with_bias: bool,
        columns: int,
        basis: Tensor | None,
        generator: torch.Generator,
        rows: int,
        shared: bool = False,
    ) -> None:
        d, device = layer_dim(layer, with_bias), next(layer.parameters()).device
        self._with_bias, self._columns, self._basis, self._generator = with_bias, columns, basis, generator
        cheaper = not shared and covariance_is_cheaper(layer, rows, d, columns)
        self._covariance = InputCovariance(layer, with_bias, device) if cheaper else None
        self._sketch = Sketch(d, columns, device=device)  # takes no memory before its first inputs

    def add(self, layer: nn.Module, x: Tensor) -> None:
        """Add inputs of the layer, or of a copy of it, from a forward pass."""
        if self._covariance is not None:
            self._covariance.add(layer, x)
        else:
            sketch_rows(self._sketch, layer_inputs(layer, x, self._with_bias), self._basis, self._generator)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sketch ``A [d, s]`` of all inputs added, and the float64 scalars ``||X||_F^2`` and ``||X*||_F^2``; to be
        called once."""
        if self._covariance is None:
            return self._sketch.A, self._sketch.input_energy, self._sketch.residual_energy
        matrix, self._covariance = self._covariance.matrix(), None
        return draw_sketch(matrix, self._basis, self._columns, self._generator)
