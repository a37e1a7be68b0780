"""What becomes of clients' gradients in view of a reference gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Refinement = Literal["project", "project_and_scale", "rotate", "average"]
REFINEMENTS: tuple[Refinement, ...] = ("project", "project_and_scale", "rotate", "average")

Gradients = Mapping[str, Tensor]
"""Name -> ``[k, ...]`` of k clients, or for a reference also ``[1, ...]``, the same for all."""


def inner(left: Gradients, right: Gradients) -> Tensor:
    """``[k]`` float64 inner products over all parameters that both have."""
    total: Tensor | float = 0.0
    for name, values in left.items():
        if name in right:
            # Each tensor in its own precision, tensors in float64.
            total = total + (values * right[name]).reshape(len(values), -1).sum(1).double()
    assert isinstance(total, Tensor)
    return total


def conflicting(gradients: Gradients, reference: Gradients) -> Tensor:
    """``[k]`` bool: whose gradient is at more than a right angle to its reference."""
    return inner(gradients, reference) < 0


@torch.no_grad()
def refine(gradients: Gradients, reference: Gradients, rows: Tensor, how: Refinement = "project") -> None:
    """Change the gradients of some clients, in place (Dai et al., 2024, eq 5 and section 5.3.1).

    - ``project``: ``g - (g.r / r.r) r``, the closest vector to g that is not at more than a right angle to r, where g
      is (Chaudhry et al., 2019, eq 11);
    - ``project_and_scale``: that, as long as g;
    - ``rotate``: ``|g| (g + r) / |g + r|``;
    - ``average``: ``(g + r) / 2``.

    A reference of length 0 changes nothing.

    Args:
        gradients: of k clients.
        reference: theirs; parameters that it lacks have reference 0.
        rows: ``[k]`` bool, whose gradients to change.
        how: one of these.
    """
    length = inner(reference, reference)
    rows = rows & (length > 0)
    if not bool(rows.any()):
        return
    ones = torch.ones_like(length)
    if how == "average":
        _combine(gradients, reference, rows, 0.5 * ones, 0.5 * ones)
        return
    squared, product = inner(gradients, gradients), inner(gradients, reference)
    if how == "rotate":
        own, of_reference, result = ones, ones, squared + 2 * product + length
    else:
        own, of_reference = ones, -product / length.clamp(min=torch.finfo(torch.float64).tiny)
        result = squared - product.square() / length.clamp(min=torch.finfo(torch.float64).tiny)
    if how != "project":
        # What is left of g may be nothing; then there is no direction to give a length to.
        something = result > 8 * torch.finfo(next(iter(gradients.values())).dtype).eps * squared
        scale = (squared / result.clamp(min=1e-30)).sqrt() * something
        own, of_reference = own * scale, of_reference * scale
    _combine(gradients, reference, rows, own, of_reference)


def _combine(gradients: Gradients, reference: Gradients, rows: Tensor, own: Tensor, of_reference: Tensor) -> None:
    """``own g + of_reference r`` for some rows; ``[k]`` or ``[1]`` factors."""
    own = torch.where(rows, own, torch.ones_like(own))
    of_reference = torch.where(rows, of_reference, torch.zeros_like(of_reference))
    for name, gradient in gradients.items():
        factors = (f.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1)) for f in (own, of_reference))
        gradient.mul_(next(factors))
        if name in reference:
            gradient.add_(next(factors) * reference[name])
