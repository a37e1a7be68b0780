"""Gives each client its own learning rate, although one optimizer trains all clients of a cohort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

LINEAR_OPTIMIZERS = frozenset({"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta"})
"""Optimizers whose step is proportional to the learning rate, and whose state does not depend on it."""

ELEMENTWISE_OPTIMIZERS = LINEAR_OPTIMIZERS | {"ASGD", "Rprop"}
"""Optimizers that treat every weight by itself, so that stacked clients do not mix. Others are refused."""


class ScaledSteps:
    """Rescales every client's part of a step that has been taken: ``w <- w_before + f_c (w - w_before)``.

    For the optimizers of :data:`LINEAR_OPTIMIZERS` this is the step with learning rate ``f_c lr``, weight decay
    included: their state, such as momentum, does not depend on the learning rate.

    Args:
        factors: ``[k]``; 1 leaves a client's step unchanged, and 0 leaves its weights unchanged, both bit for bit if
            the step is finite; otherwise weights become NaN.
        buffers: name -> ``[k, ...]``, before the first step; clients with factor 0 keep these values.
    """

    def __init__(self, factors: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        self.factors = factors
        still = (factors == 0).nonzero().flatten()
        self._buffers = dict(buffers or {}) if len(still) else {}
        # On the buffers' device: a list as an index would be copied there in every step.
        self._still = still.to(next((values.device for values in self._buffers.values()), still.device))
        self._kept = {name: values[self._still] for name, values in self._buffers.items()}
        self._factors: dict[str, Tensor] = {}  # shaped and typed as the parameters
        self._before: dict[str, Tensor] = {}
        self._moving: dict[str, Tensor] = {}

    @classmethod
    def of(cls, factors: Iterable[Tensor | None], buffers: Mapping[str, Tensor] | None = None) -> ScaledSteps | None:
        """Build it with the product of several factors ``[k]``; None if no client's step is rescaled."""
        given = [factor for factor in factors if factor is not None]
        if not given:
            return None
        product = torch.stack(given).prod(0)
        return None if bool((product == 1).all()) else cls(product, buffers)

    @torch.no_grad()
    def remember(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep a copy of the parameters; call this before a step.

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
        """Rescale the step that has been taken."""
        for name, parameter in self._moving.items():
            parameter.copy_(torch.lerp(self._before[name], parameter, self._factors[name]))
        for name, values in self._buffers.items():
            values[self._still] = self._kept[name]
