"""Uses a client's gradients as they are computed: for an SGD step at once, or as rows of the cohort's gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

from cfl.engines.products import Products
from cfl.engines.quadratic_pull import PullSteps


class Update(ABC):
    """Receives the gradients of one client, or of a stack of m clients with a leading axis ``[m, ...]``."""

    @abstractmethod
    def product(self, name: str, left: Tensor, right: Tensor, products: Products) -> None:
        """Receive a parameter's gradient ``left @ right``, which has the parameter's shape ``[..., o, d]``.

        For one client's convolution ``[o, C, kh, kw]`` it may be ``[o, C kh kw]``. ``products`` multiplies for one
        client; stacks use torch's batched products.
        """

    @abstractmethod
    def gradient(self, name: str, gradient: Tensor) -> None:
        """Receive a parameter's gradient, of the parameter's shape."""


class FusedSgd(Update):
    """Takes the step of plain SGD, ``w <- (1 - lr wd) w - lr g``, as soon as g is known; no gradient is kept.

    Args:
        weights: parameter name -> tensor, changed in place.
        lr: learning rate.
        weight_decay: L2 penalty.
        pulls: parameter name -> anchor, and the share of the way to it that w moves before this step, see
            :meth:`cfl.engines.quadratic_pull.Pull.step`.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], lr: float, weight_decay: float, pulls: PullSteps = MappingProxyType({})
    ) -> None:
        self.weights, self.lr, self.keep, self.pulls = weights, lr, 1.0 - lr * weight_decay, pulls

    def _pulled(self, name: str) -> Tensor:
        weight = self.weights[name]
        return weight.lerp_(*self.pulls[name]) if name in self.pulls else weight

    def product(self, name: str, left: Tensor, right: Tensor, products: Products) -> None:
        """Add the product to the weights, in one operation if the library can."""
        weight = self._pulled(name)
        if weight.ndim == 3:
            weight.baddbmm_(left, right, beta=self.keep, alpha=-self.lr)
        else:
            products.add(weight.view(len(weight), -1), left, right, keep=self.keep, scale=-self.lr)

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Apply weight decay, then the step."""
        weight = self._pulled(name)
        if self.keep != 1.0:
            weight.mul_(self.keep)
        weight.add_(gradient, alpha=-self.lr)


class KeepGradients(Update):
    """Writes gradients into tensors that methods and the optimizer read.

    Args:
        rows: parameter name -> tensor of the parameter's shape, overwritten.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.rows = rows

    def product(self, name: str, left: Tensor, right: Tensor, products: Products) -> None:
        """Write the product into the parameter's row."""
        row = self.rows[name]
        if row.ndim == 3:
            row.baddbmm_(left, right, beta=0)
        else:
            products.add(row.view(len(row), -1), left, right, keep=0, scale=1)

    def gradient(self, name: str, gradient: Tensor) -> None:
        """Copy the gradient into the parameter's row."""
        self.rows[name].copy_(gradient)


def plain_sgd(optimizer: Optimizer) -> tuple[float, float] | None:
    """Learning rate and weight decay, if the optimizer is SGD with nothing else switched on; else None."""
    if type(optimizer) is not SGD or len(optimizer.param_groups) != 1:
        return None
    group = optimizer.param_groups[0]
    if group["momentum"] or group["maximize"] or group["differentiable"]:
        return None
    return float(group["lr"]), float(group["weight_decay"])


@torch.no_grad()
def sgd_step(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float, weight_decay: float) -> None:
    """Plain SGD on all parameters at once, in one pass over their memory; those without gradient stay as they are.

    Args:
        parameters: of any shapes, changed in place.
        gradients: for each parameter a tensor of its shape, or None.
        lr: learning rate.
        weight_decay: L2 penalty.
    """
    found = [(p.detach(), g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    weights = [p for p, _ in found]
    slopes = [g if g.stride() == p.stride() else torch.empty_like(p).copy_(g) for p, g in found]
    momenta: list[Tensor | None] = [None] * len(found)
    sgd(
        weights,
        slopes,
        momenta,
        has_sparse_grad=False,
        fused=True,
        weight_decay=weight_decay,
        momentum=0.0,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
