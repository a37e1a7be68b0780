"""Hand-written steps recorded in two halves, with a loss in Python between them.

A loss that methods change cannot be recorded with the step: it may be any Python code, and its inputs, such as tasks
and logits of earlier models, change from step to step. But it is a function of the logits, which are few numbers. The
forward pass before it and the backward pass after it are therefore recorded, as whole steps are in
:mod:`cfl.engines.recorded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cfl.engines.chain import Chain, Head
from cfl.engines.layers import Pass
from cfl.engines.quadratic_pull import PullSteps
from cfl.engines.tracing import flat, to_be_changed, traced, update_of
from cfl.engines.updates import KeepGradients, Update


@dataclass(frozen=True)
class Halves:
    """A recorded step of one client, for one batch size and kind of update.

    Attributes:
        forward: function of inputs, weights and masks that returns the logits, and then all tensors that the layers
            keep for the backward half.
        backward: function of the gradient by the logits, the kept tensors, weights, masks, gradient rows and pulls. It
            changes weights or rows; its return value has no meaning.
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
        pulls: PullSteps,
    ) -> Tensor:
        """Take one training step.

        Args:
            x: ``[B, C, H, W]``; may be changed.
            head: function of the logits ``[B, O]`` that returns the loss and its gradient.
            weights: in the order in which they were recorded.
            masks: dropout masks, in the order in which they were recorded.
            rows: gradient rows, in the order of the weights; empty if the optimizer's step is taken at once.
            pulls: on the weights, see :class:`~cfl.engines.updates.FusedSgd`.

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
    pulls: PullSteps,
) -> Halves:
    """Record a chain's step in two halves.

    Args:
        chain: the network's layers.
        fused_sgd: see :class:`cfl.engines.base.StepContext`.
        weights: of any client.
        x: a client's batch ``[B, C, H, W]`` of the size to record; not changed.
        masks: its dropout masks.
        pulls: on any client.
    """
    products = chain.products.of_step(len(x))
    structure: list[Any] = []  # the lists that the layers keep, with a place instead of every tensor

    def begin(given: Sequence[Tensor], update: Update | None = None) -> Pass:
        """A pass with the weights and masks at the start of ``given``; the rest is for the update, if none is given."""
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
    # Copies, because recording and running change inputs, for example by a dropout that comes first.
    first = traced(forward, (x.clone(), *copies, *dropped))
    with torch.no_grad():
        logits, *kept = first(x.clone(), *copies, *dropped)
    second = traced(backward, (torch.zeros_like(logits), *kept, *copies, *dropped, *rows, *flat(pulls)))
    return Halves(first, second)


@dataclass(frozen=True)
class _Place:
    number: int


def _taken_out(saved: Any, tensors: list[Tensor]) -> Any:
    """Copy nested lists and tuples as lists; every tensor is appended to ``tensors`` and replaced by its place."""
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
