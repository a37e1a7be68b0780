"""What recordings of whole and of half steps share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cfl.engines.quadratic_pull import Steps
from cfl.engines.updates import KeepGradients, StepAtOnce, Update


def traced(function: Callable[..., Any], given: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The function as ``torch.jit.trace`` records it; the recording runs it, which changes what it is given."""
    with warnings.catch_warnings(), torch.no_grad():
        # That sizes become constants is meant: there is one recording per size.
        warnings.simplefilter("ignore")
        recording: Callable[..., Any] = torch.jit.trace(function, given, check_trace=False)
    return recording


def to_be_changed(
    weights: Mapping[str, Tensor], fused_sgd: tuple[float, float] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights to record with, and gradient rows, of which there are none where the step is taken ``fused_sgd``."""
    copies = [weight.clone() for weight in weights.values()]
    return copies, [torch.zeros_like(weight) for weight in copies] if fused_sgd is None else []


def update_of(
    fused_sgd: tuple[float, float] | None, weights: Mapping[str, Tensor], last: Sequence[Tensor], pulls: Steps
) -> Update:
    """What takes the gradients in a recording, of the ``last`` tensors it is given: gradient rows, or pulls."""
    if fused_sgd is None:
        return KeepGradients(dict(zip(weights, last, strict=True)))
    drawn = zip(last[::2], last[1::2], strict=True)
    return StepAtOnce(weights, *fused_sgd, dict(zip(pulls, drawn, strict=True)))


def flat(pulls: Steps) -> list[Tensor]:
    """Anchor and share of one after another."""
    return [tensor for pull in pulls.values() for tensor in pull]
