"""One client's sketch of one layer's inputs (FOT eq 8, 9)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.covariance import InputCovariance, covariance_is_cheaper, draw_sketch
from cfl.methods.components.layer_inputs.rows import layer_dim, layer_inputs
from cfl.methods.components.subspace import energy, project


class Sketch:
    """A client's random sketch of one layer's inputs, built piece by piece (FOT eq 8-9).

    ``A = X* G`` with ``X*`` the inputs minus their part inside the basis, one column per input, and ``G`` standard
    normal. ``E[A A^T] = s X* X*^T``, so the principal directions of ``A`` approximate those of the data, and the sum
    of several clients' ``A`` is the sketch of their pooled data: the server needs only sums. That holds if every
    client and piece has its own ``G``; shared draws would sketch the sum of the clients' inputs instead.

    :func:`cfl.methods.components.layer_inputs.covariance.draw_sketch` gives a sketch of the same distribution from the
    inputs' covariance alone.

    Float32 products must be true float32 here: with TF32 the residual of an input inside the basis is up to 1e-3 of it
    instead of 1e-7. Autocast is switched off inside. TF32 is switched off by the caller, between local steps
    (:func:`cfl.runtime.precision.full_precision`).

    Args:
        d: length of the input vectors, see :func:`cfl.methods.components.layer_inputs.rows.layer_dim`.
        s: number of columns. More columns give a more accurate spectrum: on power-law spectra ``s = 5 d`` comes close,
            while ``s = d`` under-estimates the rank for a given threshold.
        dtype: of ``A`` and of the arithmetic, ``torch.float32`` or ``torch.float64``.
        device: where ``A`` lives.

    Attributes:
        A: ``[d, s]``.
        input_energy: ``||X||_F^2``, float64 scalar tensor on ``device``.
        residual_energy: ``||X*||_F^2``, likewise.
        rows: number of inputs so far.
    """

    def __init__(
        self, d: int, s: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        # Allocated later: filling a wide sketch with zeros takes longer than multiplying its first piece.
        self.A = torch.zeros((), dtype=dtype, device=device).expand(d, s)
        self.input_energy = torch.zeros((), dtype=torch.float64, device=device)
        self.residual_energy = torch.zeros((), dtype=torch.float64, device=device)
        self.rows = 0

    @torch.no_grad()
    def add(self, rows: Tensor, basis: Tensor | None, gaussian: Tensor) -> None:
        """Add one piece of inputs; they are not stored.

        Args:
            rows: ``[n, d]`` layer inputs, any float dtype.
            basis: ``[d, k]`` basis of earlier tasks, or None.
            gaussian: ``[n, s]`` standard normal, drawn afresh for every piece.
        """
        with torch.autocast(self.A.device.type, enabled=False):
            rows = rows.to(self.A.dtype)
            residual = rows if basis is None else project(rows, basis.to(self.A.dtype))
            gaussian = gaussian.to(self.A.dtype)
            self.A = residual.T @ gaussian if self.rows == 0 else self.A.addmm_(residual.T, gaussian)
            self.input_energy += energy(rows)
            self.residual_energy += energy(residual)
        self.rows += len(rows)


def sketch_rows(sketch: Sketch, rows: Iterable[Tensor], basis: Tensor | None, generator: torch.Generator) -> None:
    """Add pieces of inputs to a sketch, drawing each piece's Gaussian matrix from ``generator``.

    The draws are float32 on the generator's device, so a CPU generator gives the same numbers for a sketch on any
    device. The same pieces give the same draws; cutting the same inputs differently gives other, equally good draws.

    Args:
        sketch: changed in place.
        rows: pieces ``[n, d]``, such as :func:`cfl.methods.components.layer_inputs.rows.layer_inputs` yields.
        basis: ``[d, k]`` or None, see :meth:`Sketch.add`.
        generator: one per client, layer and task, so that no two clients share draws.
    """
    for piece in rows:
        gaussian = torch.randn(len(piece), sketch.A.shape[1], generator=generator, device=generator.device)
        sketch.add(piece, basis, gaussian.to(sketch.A.device))


class LayerSketch:
    """Computes ``A = X* G`` (FOT eq 8, 9), either piece by piece (:class:`Sketch`) or from the covariance.

    Both ways have the same distribution (:func:`cfl.methods.components.layer_inputs.covariance.draw_sketch`). The
    choice depends on layer, ``rows`` and ``columns`` only. It is the same on every machine and device. Draws from the
    covariance do not depend on the batch size; those piece by piece may. With many more rows than dimensions, as for
    convolutions, the covariance is several times cheaper.

    Args:
        layer: see :func:`cfl.methods.components.layer_inputs.rows.layer_dim`.
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
