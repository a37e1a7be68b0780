"""The inverse of a growing sum of positive definite matrices, stored as a multiple of a matrix of fixed trace."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_with(inverse: Tensor | None, added: Tensor) -> Tensor:
    """``(S + N)^-1`` from ``S^-1``, without computing ``S``.

    With ``S^-1 = C C^T`` and ``I + C^T N C = L L^T``, Woodbury's identity reads ``(S + N)^-1 = B^T B`` with
    ``B = L^-1 C^T``. The result is symmetric and positive definite, and no nearly equal numbers are subtracted.

    Args:
        inverse: ``[d, d]``, ``S^-1``; None if there is no ``S`` yet.
        added: ``[d, d]``, ``N``, positive semidefinite; definite if it is the first.

    Returns:
        ``[d, d]`` float64.
    """
    n = added.double()
    if inverse is None:
        return torch.cholesky_inverse(torch.linalg.cholesky(n))
    c = factor(inverse.double())
    inner = torch.linalg.cholesky(torch.eye(len(n), dtype=n.dtype, device=n.device) + c.T @ n @ c)
    b = torch.linalg.solve_triangular(inner, c.T, upper=False)
    return b.T @ b


def factor(matrix: Tensor) -> Tensor:
    """Lower triangular ``C`` with ``C C^T = matrix``.

    Rounding to float32 may leave an eigenvalue just below zero. The mean eigenvalue times the smallest power of ten,
    from 1e-9 on, that makes the matrix positive definite is then added to all eigenvalues.
    """
    symmetric = (matrix + matrix.T) / 2
    mean = symmetric.diagonal().mean()
    lower, failed = torch.linalg.cholesky_ex(symmetric)
    power = -9
    while bool(failed) and power < 0:
        lower, failed = torch.linalg.cholesky_ex(symmetric + 10.0**power * mean * torch.eye(len(matrix)).to(symmetric))
        power += 1
    if bool(failed):
        raise ValueError(f"a matrix of shape {list(matrix.shape)} is not positive definite")
    return lower


def normalised(inverse: Tensor) -> tuple[Tensor, Tensor]:
    """``P`` and ``s`` with ``inverse = s P`` and ``trace P = d``."""
    scale = inverse.diagonal().mean()
    return inverse / scale, scale
