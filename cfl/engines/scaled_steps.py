"""An optimizer's step with a learning rate of each client's own, where one optimizer trains all clients of a cohort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

LINEAR_OPTIMIZERS = frozenset({"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"})
"""Optimizers whose step is proportional to the learning rate, which has no part in what they keep."""


class ScaledSteps:
    """Rescales every client's part of a step that has been taken: ``w <- w_before + f_c (w - w_before)``.

    For the optimizers of :data:`LINEAR_OPTIMIZERS` this is the step with learning rate ``f_c lr``, weight decay
    included: what they keep, such as momentum, does not depend on the learning rate.

    Args:
        factors: ``[k]``; for 1 a client's step stays as it is, and for 0 it does not move, both bit for bit.
        buffers: name -> ``[k, ...]``, as they are before the first step: those of a client that does not move stay.
    """

    def __init__(self, factors: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.factors = factors
        self._still = (factors == 0).nonzero().flatten().tolist()
        self._buffers = dict(buffers or {}) if self._still else {}
        self._kept = {name: values[self._still] for name, values in self._buffers.items()}
        self._factors: dict[str, Tensor] = {}  # shaped and typed as the parameters
        self._before: dict[str, Tensor] = {}
        self._moving: dict[str, Tensor] = {}

    @classmethod
    def of(cls, factors: Iterable[Tensor | None], buffers: Mapping[str, Tensor] | None = None) -> ScaledSteps | None:
        """With the product of several factors ``[k]``; None where nobody's step is rescaled."""
        given = [factor for factor in factors if factor is not None]
        if not given:
            return None
        product = torch.stack(given).prod(0)
        return None if bool((product == 1).all()) else cls(product, buffers)

    @torch.no_grad()
    def remember(self, parameters: Mapping[str, Tensor]) -> None:
        """The step is about to be taken.

        Args:
            parameters: name -> ``[k, ...]``; those without a gradient will not move.
        """
        self._moving = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
        for name, parameter in self._moving.items():
            if name in self._before:
                self._before[name].copy_(parameter)
            else:
                self._before[name] = parameter.detach().clone()
                self._factors[name] = self.factors.to(parameter).view(-1, *[1] * (parameter.ndim - 1))

    @torch.no_grad()
    def rescale(self) -> None:
        """The step has been taken."""
        for name, parameter in self._moving.items():
            parameter.copy_(torch.lerp(self._before[name], parameter, self._factors[name]))
        for name, values in self._buffers.items():
            values[self._still] = self._kept[name]
