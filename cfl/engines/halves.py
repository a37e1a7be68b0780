"""Hand-written steps recorded in two halves, with a loss in Python between them.

A loss that methods change cannot be recorded with the step: it is any Python, and what it looks at, such as
tasks and logits of earlier models, changes from step to step. It is a function of the logits, though, and few numbers;
what comes before and after it is recorded as the steps of :mod:`cfl.engines.recorded` are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cfl.engines.chain import Chain, Head
from cfl.engines.layers import Pass
from cfl.engines.quadratic_pull import Steps
from cfl.engines.tracing import flat, to_be_changed, traced, update_of
from cfl.engines.updates import KeepGradients, Update


@dataclass(frozen=True)
class Halves:
    """A recorded step of one client, for one batch size and kind of update.

    Attributes:
        forward: inputs, weights and masks to the logits and, behind them, what the layers keep for the other half.
        backward: the gradient by the logits, what the layers kept, weights, masks, gradient rows and pulls to nothing
            of interest: it changes weights or rows.
    """

    forward: Callable[..., Sequence[Tensor]]
    backward: Callable[..., Tensor]

    @torch.no_grad()
    def step(
        self,
        x: Tensor,
        head: Head,
        weights: list[Tensor],
        masks: list[Tensor],
        rows: list[Tensor],
        pulls: Steps,
    ) -> Tensor:
        """One training step.

        Args:
            x: ``[B, C, H, W]``; may be changed.
            head: logits ``[B, O]`` to loss and its gradient.
            weights: in the order of those it was recorded with.
            masks: dropout masks, likewise.
            rows: where gradients go, as the weights; none where the step is taken at once.
            pulls: on the weights, see :class:`~cfl.engines.updates.StepAtOnce`.

        Returns:
            The loss, ``[]``.
        """
        logits, *kept = self.forward(x, *weights, *masks)
        loss, g = head(logits)
        self.backward(g, *kept, *weights, *masks, *rows, *flat(pulls))
        return loss


def record_halves(
    chain: Chain,
    fused_sgd: tuple[float, float] | None,
    weights: Mapping[str, Tensor],
    x: Tensor,
    masks: Mapping[str, Tensor],
    pulls: Steps,
) -> Halves:
    """Record a chain's step.

    Args:
        chain: the network's layers.
        fused_sgd: see :class:`cfl.engines.base.StepContext`.
        weights: of any client.
        x: a client's batch of the size that is wanted, ``[B, C, H, W]``; stays as it is.
        masks: its dropout masks.
        pulls: on any client.
    """
    products = chain.products.of_step(len(x))
    structure: list[Any] = []  # of what the layers keep, with a place for every tensor

    def begin(given: Sequence[Tensor], update: Update | None = None) -> Pass:
        """A pass with weights and masks, which are given first; with the update for which the rest is, or for none."""
        held = dict(zip(weights, given, strict=False))
        dropped = dict(zip(masks, given[len(weights) :], strict=False))
        last = given[len(weights) + len(masks) :]
        return Pass(held, dropped, update or update_of(fused_sgd, held, last, pulls), 1, None, products)

    def forward(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        run = begin(given, KeepGradients({}))
        logits = chain.forward(run, x)
        kept: list[Tensor] = []
        structure[:] = _taken_out(run.saved, kept)
        return (logits, *kept)

    def backward(g: Tensor, *given: Tensor) -> Tensor:
        run = begin(given[len(kept) :])
        run.saved = _put_back(structure, given)
        chain.backward(run, g)
        return g  # a recording must return something

    copies, rows = to_be_changed(weights, fused_sgd)
    dropped = list(masks.values())
    # Recording and running change inputs, such as by a dropout that comes first: copies.
    first = traced(forward, (x.clone(), *copies, *dropped))
    with torch.no_grad():
        logits, *kept = first(x.clone(), *copies, *dropped)
    second = traced(backward, (torch.zeros_like(logits), *kept, *copies, *dropped, *rows, *flat(pulls)))
    return Halves(first, second)


@dataclass(frozen=True)
class _Place:
    number: int


def _taken_out(saved: Any, tensors: list[Tensor]) -> Any:
    """The same lists, and tuples as lists, with every tensor moved to the end of ``tensors``."""
    if isinstance(saved, Tensor):
        tensors.append(saved)
        return _Place(len(tensors) - 1)
    if isinstance(saved, list | tuple):
        return [_taken_out(part, tensors) for part in saved]
    return saved


def _put_back(saved: Any, tensors: Sequence[Tensor]) -> Any:
    """Undo :func:`_taken_out`."""
    if isinstance(saved, _Place):
        return tensors[saved.number]
    return [_put_back(part, tensors) for part in saved] if isinstance(saved, list) else saved
