"""Symmetric matrices as the numbers of one triangle, so that each number is sent once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pack(lower: Tensor) -> Tensor:
    """The lower triangle of a symmetric ``[d, d]`` matrix, row by row, as ``[d (d + 1) / 2]``; the upper is not read.

    Entries beside the diagonal are multiplied by sqrt(2). The vector's norm is then the matrix's Frobenius norm, so
    that clipping one clips the other.
    """
    packed = torch.cat([row[: number + 1] for number, row in enumerate(lower)]).mul_(math.sqrt(2.0))
    number = torch.arange(len(lower), device=lower.device)
    packed[number * (number + 3) // 2] = lower.diagonal()
    return packed


def unpack(packed: Tensor, d: int) -> Tensor:
    """The symmetric ``[d, d]`` matrix of a vector that :func:`pack` made, in float64."""
    row, column = torch.tril_indices(d, d, device=packed.device)
    values = torch.where(row == column, packed.double(), packed.double() * math.sqrt(0.5))
    matrix = values.new_zeros(d, d)
    matrix[row, column] = values
    matrix[column, row] = values
    return matrix
