"""The part of a layer's inputs outside a basis, collected in pieces, and its principal directions."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.methods.components.subspace import energy, principal_directions, project, residual_share


class ResidualInputs:
    """Exact counterpart of :class:`cfl.methods.components.layer_inputs.sketch.Sketch` for inputs that are not sent.

    Rows are stored while there are fewer than ``d`` of them; from then on, their second moments ``[d, d]``.

    Args:
        basis: ``[d, k]`` orthonormal columns, ``k >= 0``.
    """

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis
        self._rows: list[Tensor] = []
        self._count = 0
        self._moments: Tensor | None = None
        self._energy = torch.zeros((), dtype=torch.float64, device=basis.device)
        self._residual_energy = torch.zeros((), dtype=torch.float64, device=basis.device)

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Add inputs ``[n, d]``."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        residual = project(rows, self.basis)
        self._energy += energy(rows)
        self._residual_energy += energy(residual)
        self._rows.append(residual.clone() if residual is rows else residual)
        self._count += len(rows)
        d = len(self.basis)
        if self._count >= d:
            if self._moments is None:
                self._moments = torch.zeros(d, d, dtype=torch.float64, device=rows.device)
            # In float32 singular values that are 0 would come out as 1e-4 of the largest.
            together = torch.cat(self._rows).double()
            self._moments += together.T @ together
            self._rows = []

    @property
    def share(self) -> float:
        """``||X*||_F / ||X||_F`` in [0, 1], 0 without inputs."""
        return residual_share(self._energy, self._residual_energy)

    def principal(self) -> tuple[Tensor, Tensor]:
        """Left singular vectors ``[d, m]`` and singular values ``[m]`` of the residual inputs, largest first, float64.

        For float32 inputs, singular values below about 1e-6 of the largest, and their vectors, are rounding errors.
        """
        if self._moments is not None:
            energies, vectors = torch.linalg.eigh(self._moments)
            return vectors.flip(1), energies.flip(0).clamp(min=0).sqrt()
        if not self._rows:
            empty = self.basis.new_zeros(len(self.basis), 0, dtype=torch.float64)
            return empty, empty[0]
        rows = torch.cat(self._rows).double()
        left, values = principal_directions(rows)
        return rows.T @ left / values.clamp(min=torch.finfo(torch.float64).tiny), values
