"""Symmetric matrices as the numbers of one triangle, so that they are sent once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_size(d: int) -> int:
    """Numbers of a packed symmetric ``[d, d]`` matrix: ``d (d + 1) / 2``."""
    return d * (d + 1) // 2


def pack(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric ``[d, d]`` matrix, row by row, as ``[d (d + 1) / 2]``.

    Entries beside the diagonal are multiplied by sqrt(2). The vector's norm is then the matrix's Frobenius norm, so
    that clipping one clips the other.
    """
    row, column = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column] * _scale(row, column, matrix.dtype)


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric ``[d, d]`` matrix of a vector that :func:`pack` made, in float64."""
    row, column = torch.tril_indices(d, d, device=packed.device)
    values = packed.double() / _scale(row, column, torch.float64)
    matrix = values.new_zeros(d, d)
    matrix[row, column] = values
    matrix[column, row] = values
    return matrix


def _scale(row: Tensor, column: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(row == column, 1.0, math.sqrt(2.0)).to(dtype)
