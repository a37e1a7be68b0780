"""Functions for recordings of whole steps and of half steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cfl.engines.quadratic_pull import PullSteps
from cfl.engines.updates import FusedSgd, KeepGradients, Update


def traced(function: Callable[..., Any], given: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Record a function by ``torch.jit.trace``. This runs the function, which may change the given tensors."""
    with warnings.catch_warnings(), torch.no_grad():
        # Torch warns that sizes become constants. This is intended: there is one recording per size.
        warnings.simplefilter("ignore")
        recording: Callable[..., Any] = torch.jit.trace(function, given, check_trace=False)
    return recording


def to_be_changed(
    weights: Mapping[str, Tensor], fused_sgd: tuple[float, float] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of the weights to record with, and gradient rows; no rows if the step is taken at once (``fused_sgd``)."""
    copies = [weight.clone() for weight in weights.values()]
    return copies, [torch.zeros_like(weight) for weight in copies] if fused_sgd is None else []


def update_of(
    fused_sgd: tuple[float, float] | None, weights: Mapping[str, Tensor], last: Sequence[Tensor], pulls: PullSteps
) -> Update:
    """The update that receives the gradients in a recording; its ``last`` tensors are gradient rows, or pulls."""
    if fused_sgd is None:
        return KeepGradients(dict(zip(weights, last, strict=True)))
    drawn = zip(last[::2], last[1::2], strict=True)
    return FusedSgd(weights, *fused_sgd, dict(zip(pulls, drawn, strict=True)))


def flat(pulls: PullSteps) -> list[Tensor]:
    """The anchors and shares of pulls in one list, pull by pull."""
    return [tensor for pull in pulls.values() for tensor in pull]
