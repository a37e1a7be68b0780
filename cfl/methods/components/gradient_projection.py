"""Projects, scales, rotates or averages clients' gradients with respect to a reference gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

Refinement = Literal["project", "project_and_scale", "rotate", "average"]
REFINEMENTS: tuple[Refinement, ...] = get_args(Refinement)

ROUNDING = 64
"""A projection on the reference, in units of its length, counts as 0 up to this many times the sums' precision."""

Gradients = Mapping[str, Tensor]
"""Name -> ``[k, ...]`` of k clients, or for a reference also ``[1, ...]``, the same for all."""


def inner(left: Gradients, right: Gradients) -> Tensor:
    """``[k]`` float64 inner products over all parameters that both have."""
    total: Tensor | float = 0.0
    for name, values in left.items():
        if name in right:
            # Within a tensor the sum has the tensor's precision, at least float32; over tensors it is float64.
            values = values.to(_sums_in(values.dtype))
            total = total + (values * right[name]).reshape(len(values), -1).sum(1).double()
    assert isinstance(total, Tensor)
    return total


def _sums_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of gradients of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32)


def conflicts(product: Tensor, length: Tensor, dtype: torch.dtype) -> Tensor:
    """``[k]`` bool: which gradients are at more than a right angle to the reference, ``g . g_ref < 0`` (eq 5).

    A gradient that is 0 up to rounding, as for a client whose model is its own teacher, may have a product of either
    sign. Such gradients do not count as conflicts, so that the result does not depend on rounding.

    Args:
        product: ``[k]`` inner products of gradients and reference.
        length: ``[k]`` or ``[1]`` squared length of the reference.
        dtype: dtype of the gradients.
    """
    return product < -ROUNDING * torch.finfo(_sums_in(dtype)).eps * length


@torch.no_grad()
def refine(
    gradients: Gradients,
    reference: Gradients,
    rows: Tensor,
    product: Tensor,
    length: Tensor,
    how: Refinement = "project",
) -> None:
    """Change the gradients of some clients, in place (Dai et al., 2024, eq 5 and section 5.3.1).

    - ``project``: ``g - (g.r / r.r) r``. For g at more than a right angle to r, this is the closest vector to g that is
      not (Chaudhry et al., 2019, eq 11);
    - ``project_and_scale``: the same vector, scaled to the length of g;
    - ``rotate``: ``|g| (g + r) / |g + r|``;
    - ``average``: ``(g + r) / 2``.

    A reference of length 0 changes nothing.

    Args:
        gradients: gradients of k clients.
        reference: their reference; parameters that it lacks have reference 0.
        rows: ``[k]`` bool, clients whose gradients to change.
        product: ``[k]`` inner products of gradients and reference.
        length: ``[k]`` or ``[1]`` squared length of the reference.
        how: one of the four ways above.
    """
    rows = rows & (length > 0)
    if rows.device.type == "cpu" and not bool(rows.any()):  # on an accelerator, this test would wait for the device
        return
    ones = torch.ones_like(length)
    if how == "average":
        _combine(gradients, reference, rows, 0.5 * ones, 0.5 * ones)
        return
    along = -product / length.clamp(min=torch.finfo(torch.float64).tiny)
    if how == "project":
        _combine(gradients, reference, rows, None, along)
        return
    squared = inner(gradients, gradients)
    if how == "rotate":
        of_reference, result = ones, squared + 2 * product + length
    else:
        of_reference, result = along, squared + along * product
    # The projected g may be 0, and then has no direction to scale: by rounding of the sums, or of the result itself.
    dtype = next(iter(gradients.values())).dtype
    rounding = max(torch.finfo(_sums_in(dtype)).eps, torch.finfo(dtype).eps ** 2)
    something = result > 8 * rounding * squared
    scale = (squared / result.clamp(min=1e-30)).sqrt() * something
    _combine(gradients, reference, rows, scale, of_reference * scale)


def _combine(
    gradients: Gradients, reference: Gradients, rows: Tensor, own: Tensor | None, of_reference: Tensor
) -> None:
    """Change g in some rows to ``own g + of_reference r``; factors are ``[k]`` or ``[1]``, and None is 1."""
    own = None if own is None else torch.where(rows, own, torch.ones_like(own))
    of_reference = torch.where(rows, of_reference, torch.zeros_like(of_reference))
    for name, gradient in gradients.items():
        shape = (-1, *[1] * (gradient.ndim - 1))
        if own is not None:
            gradient.mul_(own.to(gradient.dtype).view(shape))
        if name in reference:
            gradient.addcmul_(of_reference.to(gradient.dtype).view(shape), reference[name])
