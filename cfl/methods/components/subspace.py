"""Orthogonal subspaces of layer inputs: choice of the rank, growing a basis, projecting updates.

The linear algebra of FOT (Federated Orthogonal Training, ICLR 2024) and of its parent GPM (Gradient Projection
Memory, ICLR 2021), as plain functions on tensors. A layer computes ``W x``. If every change of ``W`` is orthogonal
to the inputs ``x`` of earlier tasks, the layer's outputs for these inputs do not change.

Inputs are rows here, ``[n, d]``, the transpose of the papers' ``X``, as networks hold them. A weight ``[o, d]`` then
acts as ``rows @ weight.T``. A basis ``O`` is ``[d, k]`` with orthonormal columns, ``0 <= k <= d``; ``None`` and
``[d, 0]`` both mean that nothing is protected yet.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

RankRule = Literal["code", "gpm"]

# Float32 rounding error of values that should be 0, relative to their inputs. Measured for 27 <= d <= 2048: at most
# 3.4e-7 for the residual of rows inside the basis, at most 1.7e-7 for a sketch's surplus directions.
_ROUNDING = 1e-6

# If less than this share of a new direction lies outside the basis, its part outside is float32 rounding.
_INSIDE = 1e-5


def energy(rows: Tensor) -> Tensor:
    """``||rows||_F^2`` as float64: short sums in the rows' own precision, the long one over rows in float64."""
    return torch.linalg.vector_norm(rows, dim=1).double().square().sum()


def residual_share(input_energy: Tensor | float, residual_energy: Tensor | float) -> float:
    """``rho = ||X*||_F / ||X||_F``, the share of a task's inputs outside the basis, in [0, 1]; not squared.

    With energies summed over clients it is exact for the pooled data. FOT's Appendix E adds up the clients' own
    ratios, a sum that grows with their number; its code averages them. For a layer whose inputs are all zero the share
    is 0.

    Args:
        input_energy: ``||X||_F^2``, scalar.
        residual_energy: ``||X*||_F^2``, scalar.
    """
    total, left = float(input_energy), float(residual_energy)
    return math.sqrt(min(1.0, max(0.0, left) / total)) if total > 0 else 0.0


def choose_rank(
    singular_values: Tensor, rho: float, threshold: float, rule: RankRule, minimum_rank: int, room: int
) -> int:
    """The number of principal directions of a sketch to add to the basis.

    With ``f_r = sum_{j<=r} S_j^2 / sum_j S_j^2`` the energy share of the first ``r`` directions in the residual,
    ``f_0 = 0``, the rule's answer is the smallest ``r`` with

    - ``"gpm"``: ``rho^2 f_r + (1 - rho^2) >= threshold`` (GPM eq 9): the grown basis holds at least ``threshold`` of
      the task's total input energy;
    - ``"code"``: ``f_r > (rho - (1 - threshold)) / rho``, the rule in the code of FOT's authors. It uses the norm ratio
      ``rho`` as if it were an energy ratio and so keeps more, ``1 - rho (1 - threshold)`` of the total energy: 95 %
      where GPM keeps 90 %, for ``threshold`` 0.9 and ``rho`` 0.5. FOT's eq 12 as printed is met by ``r = 0`` at the
      first task (it adds the residual's share instead of the covered one) and is not offered.

    Both assume an exact spectrum. That of a narrow sketch is spread, so that the rank comes out too small
    (:class:`cfl.methods.components.layer_inputs.sketch.Sketch`).

    The result may be 0, if the basis covers the task well enough. The authors' code adds one direction in that case
    too (``minimum_rank=1``). Over 20 tasks that alone takes 19 of the 27 dimensions of a first layer on 3x3 patches of
    colour images. Hence the default minimum is 0; the published numbers were computed with 1.

    Args:
        singular_values: ``[m]``, of the summed sketch, descending.
        rho: residual share of the task's inputs in [0, 1], see :func:`residual_share`. Below 1e-6 it is rounding, and
            the result is ``minimum_rank``.
        threshold: share to be covered, in [0, 1].
        rule: ``"code"`` or ``"gpm"``.
        minimum_rank: directions to add even if the rule needs fewer, at least 0.
        room: ``d - k``, directions the basis can still take.

    Returns:
        Directions to add: at most ``room``, and at most the number of singular values above 1e-6 of the largest, as
        the others are rounding errors. That number is also the result if no ``r`` meets the rule (``"code"`` with
        threshold 1).
    """
    values = singular_values.detach().double().cpu()
    nonzero = int((values > _ROUNDING * values.max()).sum()) if values.numel() else 0
    if nonzero == 0:
        return 0
    needed = 0
    if rho > _ROUNDING:
        cumulative = values.square().cumsum(0)
        share = torch.cat([torch.zeros(1, dtype=torch.float64), cumulative / cumulative[-1]])  # f_0, f_1, ...
        if rule == "code":
            enough = share > (rho - (1 - threshold)) / rho
        else:
            enough = rho**2 * share + (1 - rho**2) >= threshold
        # Shares ascend, so this is the first r that is enough. If none is, it is too large, and is limited below.
        needed = int((~enough).sum())
    return max(0, min(max(needed, minimum_rank), nonzero, room))


def principal_directions(A: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values of a sketch, in float64, largest first.

    A wide ``A`` goes through the eigenvectors of the ``[d, d]`` matrix ``A A^T``: 1.5 times faster than an
    SVD for ``s = d`` and 9 times for ``s = 5 d``, with singular values down to about 1e-7 of the largest, which is
    where a float32 sketch ends anyway. Each direction's sign makes its largest entry positive, so equal sketches
    give equal directions.

    Args:
        A: ``[d, s]``, any float dtype.

    Returns:
        ``U [d, m]`` with orthonormal columns and ``S [m]``, ``m = min(d, s)``, on ``A``'s device.

    Raises:
        ValueError: ``A`` has NaN or infinity.
    """
    if not bool(A.isfinite().all()):
        raise ValueError(f"a sketch of shape {list(A.shape)} has NaN or infinity")
    wide = A.detach().double()
    if A.shape[1] >= A.shape[0]:
        energies, vectors = torch.linalg.eigh(wide @ wide.T)
        directions, values = vectors.flip(1), energies.flip(0).clamp(min=0).sqrt()
    else:
        directions, values, _ = torch.linalg.svd(wide, full_matrices=False)
    return with_fixed_signs(directions), values


def with_fixed_signs(directions: Tensor) -> Tensor:
    """Columns ``[d, m]``, each with the sign that makes its entry of largest magnitude positive.

    A decomposition returns signs that depend on the device.
    """
    peak = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    return torch.where(peak < 0, -directions, directions)


def grow_basis(basis: Tensor | None, directions: Tensor) -> Tensor:
    """The basis with new directions added, orthonormal (FOT's GramSchmidt step).

    The old columns do not change, bit for bit, so that rounding errors do not accumulate over tasks. The new columns
    follow, computed in float64. Directions inside the old span, or in the span of earlier directions, are dropped. At
    ``d`` columns the basis is full and further directions are dropped.

    Args:
        basis: ``[d, k]`` or None.
        directions: ``[d, r]``, most important first; need be neither unit nor orthogonal.

    Returns:
        ``[d, k']`` with ``k <= k' <= min(d, k + r)``, in the basis's dtype (float32 if there was none).
    """
    d = directions.shape[0]
    dtype = torch.float32 if basis is None else basis.dtype
    wanted = directions.detach().double()
    lengths = torch.linalg.vector_norm(wanted, dim=0)
    old = directions.new_zeros(d, 0, dtype=dtype) if basis is None else basis
    grown = old.double()
    while wanted.shape[1] > 0 and grown.shape[1] < d:
        outside = wanted
        for _ in range(2):  # twice, because the first subtraction leaves rounding errors
            outside = outside - grown @ (grown.T @ outside)
        new = torch.linalg.vector_norm(outside, dim=0) > _INSIDE * lengths
        outside, wanted, lengths = outside[:, new], wanted[:, new], lengths[new]
        q, r = torch.linalg.qr(outside[:, : d - grown.shape[1]])
        independent = r.diagonal().abs() > _INSIDE * lengths[: r.shape[1]]
        # If a direction depends on those before it, QR fills in an arbitrary column, which may contain a later
        # direction. So take only the columns before it, and repeat with the remaining directions.
        taken = max(1, int(independent.int().cumprod(0).sum()))
        grown = torch.cat([grown, q[:, :taken]], 1)
        wanted, lengths = wanted[:, taken:], lengths[taken:]
    return torch.cat([old, grown[:, old.shape[1] :].to(dtype)], 1)


def project(delta: Tensor, basis: Tensor | None, importance: Tensor | None = None) -> Tensor:
    """``delta`` minus its part that acts on the basis: ``delta - (delta O) O^T``.

    With ``importance``, that part is removed in proportion: ``delta - (delta O) diag(importance) O^T`` (SGP, Saha and
    Roy, AAAI 2023).

    FOT eq 6. The paper writes ``O O^T delta`` for a weight stored ``[d, o]``; torch stores it ``[o, d]``, so the
    product is on the other side. Afterwards ``project(delta, O) @ O = 0``: inputs in the span of ``O`` see no change.
    The same function takes layer inputs ``[n, d]`` to their residual (eq 8).

    Args:
        delta: ``[o, d]``, or any ``[o, ...]`` with ``d`` values per leading index, e.g. ``[o, c, kh, kw]``.
        basis: ``[d, k]`` or None. Without ``importance``, ``k = d`` freezes the layer: the result is exactly zero.
        importance: ``[k]``, in [0, 1], of the basis's columns; None: all 1.

    Returns:
        The projected tensor in ``delta``'s shape and dtype; ``delta`` itself if the basis is empty.

    Raises:
        ValueError: the basis belongs to input vectors of another length.
    """
    if basis is None or basis.shape[1] == 0:
        return delta
    if delta.ndim < 2 or delta.flatten(1).shape[1] != basis.shape[0]:
        raise ValueError(f"a basis {list(basis.shape)} does not fit a tensor of shape {list(delta.shape)}")
    if importance is None and basis.shape[1] >= basis.shape[0]:
        return torch.zeros_like(delta)
    exact = torch.promote_types(delta.dtype, basis.dtype)
    flat, columns = delta.flatten(1).to(exact), basis.to(exact)
    inside = flat @ columns if importance is None else flat @ columns * importance.to(exact)
    return (flat - inside @ columns.T).to(delta.dtype).view(delta.shape)


def project_with_bias(
    weight: Tensor, bias: Tensor, basis: Tensor | None, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`project` for the updates of a weight and its bias together, on a basis of inputs with a 1 appended.

    Args:
        weight: ``[o, ...]`` with ``d`` values per output.
        bias: ``[o]``.
        basis: ``[d + 1, k]`` grown from rows with ``with_bias=True``, or None.
        importance: as for :func:`project`.
    """
    joint = project(torch.cat([weight.flatten(1), bias[:, None]], 1), basis, importance)
    return joint[:, :-1].reshape(weight.shape), joint[:, -1]


def used_share(basis: Tensor | None, d: int) -> float:
    """Share ``k / d`` of a layer's input space that is protected, in [0, 1] (FOT Table 3 averages it over layers)."""
    return 0.0 if basis is None else basis.shape[1] / d
