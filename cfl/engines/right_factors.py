"""Multiplies layer gradients from the right, every client's by a matrix of its own.

A layer computes ``W x``; with a step's inputs as rows ``a [n, d]`` and the gradients by its outputs ``delta [n, o]``
its weight has the gradient ``G = delta^T a``, ``[o, d]``. A method such as GPM or RGO replaces it by ``G F`` with one
``F [d, d]`` per client, which is computed from the inputs of earlier tasks. ``G F = delta^T (a F)``: if a step has
fewer rows than the layer has outputs, multiplying the inputs instead is cheaper and gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RightFactor:
    """Factors by which the gradients of one layer's weight are multiplied, for one client or some clients of a cohort.

    Attributes:
        matrix: ``[m, d, d]``, the factors ``F`` as they are; or, where ``removes``, ``[m, d, r]`` orthonormal columns
            ``M`` that stand for ``F = I - M M^T``. Columns of zeros are allowed: they remove nothing. One client's
            factor has no axis ``m``.
        removes: whether ``matrix`` holds ``M`` instead of ``F``.
        positions: ``[m]`` int64, the clients' places in the cohort; None for all of them. Other clients' factor is I.
    """

    matrix: Tensor
    removes: bool = False
    positions: Tensor | None = None

    def times(self, rows: Tensor) -> Tensor:
        """``rows [m, n, d]`` of the clients concerned times their factors, or ``[n, d]`` of one; new memory."""
        matrix = self.matrix
        if matrix.dtype != rows.dtype:
            exact = torch.promote_types(rows.dtype, matrix.dtype)
            return RightFactor(matrix.to(exact), self.removes).times(rows.to(exact)).to(rows.dtype)
        if not self.removes:
            return rows @ matrix
        add = torch.baddbmm if matrix.ndim == 3 else torch.addmm
        return add(rows, rows @ matrix, matrix.mT, alpha=-1)

    def of_client(self, position: int) -> RightFactor | None:
        """The factor of the client at a place of the cohort, without the leading axis; None where it is I."""
        if self.positions is None:
            return RightFactor(self.matrix[position], self.removes)
        found = (self.positions == position).nonzero().flatten().tolist()
        return RightFactor(self.matrix[found[0]], self.removes) if found else None


@torch.no_grad()
def multiply_gradients(gradients: Mapping[str, Tensor], factors: Mapping[str, RightFactor]) -> None:
    """Multiply gradients from the right, in place; a few batched products per layer, whatever the number of clients.

    Args:
        gradients: weight name -> ``[k, o, ...]`` with ``d`` values behind ``o``; names without a factor stay.
        factors: weight name -> factors of ``m <= k`` clients.
    """
    for name, factor in factors.items():
        if name not in gradients:
            continue
        gradient = gradients[name]
        if factor.positions is None:
            gradient.copy_(factor.times(_as_rows(gradient)).view(gradient.shape))
        else:
            chosen = gradient.index_select(0, factor.positions)
            gradient.index_copy_(0, factor.positions, factor.times(_as_rows(chosen)).view(chosen.shape))


def _as_rows(gradient: Tensor) -> Tensor:
    """``[m, o, ...]`` to ``[m, o, d]``; a vector per client, such as a bias, has ``d = 1``."""
    return gradient.reshape(*gradient.shape[:2], gradient.shape[2:].numel())


def zero_factor(positions: Tensor, gradient: Tensor) -> RightFactor:
    """The factor 0 for some clients' gradients of a parameter.

    Args:
        positions: ``[m]`` int64, the clients' places in the cohort.
        gradient: any tensor of the gradient's shape ``[k, o, ...]``, dtype and device.
    """
    d = gradient.shape[2:].numel()
    return RightFactor(gradient.new_zeros(()).expand(len(positions), d, d), positions=positions)


def projection_factor(columns: Tensor, outputs: int, steps: int, positions: Tensor | None = None) -> RightFactor:
    """``F = I - M M^T`` in the cheaper of its two forms.

    The columns cost ``4 o d r`` operations per step. The matrix costs ``2 o d^2`` per step, and ``2 d^2 r`` once to
    compute it.

    Args:
        columns: ``[m, d, r]``, ``M``: orthonormal, or zero.
        outputs: o, rows of the gradient.
        steps: how often the factor will be used.
        positions: see :class:`RightFactor`.
    """
    d, r = columns.shape[1:]
    if 2 * steps * outputs * r <= steps * outputs * d + d * r:
        return RightFactor(columns, removes=True, positions=positions)
    eye = torch.eye(d, dtype=columns.dtype, device=columns.device).expand(len(columns), d, d)
    return RightFactor(torch.baddbmm(eye, columns, columns.mT, alpha=-1), positions=positions)
