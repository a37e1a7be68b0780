"""Lets torch's optimizers update the weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def step_in_one_pass(optimizer: Optimizer) -> None:
    """Switch on an optimizer's fused update for parameters in the CPU's memory, unless its options choose an update.

    Torch's default on CPUs makes one pass over memory per operation, about ten for Adam. The fused update makes one
    pass, and is the same up to rounding. Torch has it for SGD, Adam, AdamW and Adagrad. Other optimizers, and
    parameters on other devices, keep torch's default. Before each step, call :func:`lay_gradients_out`.

    Args:
        optimizer: before its first step.
    """
    for group in optimizer.param_groups:
        if _may_be_fused(group):
            group["fused"] = True


def _may_be_fused(group: dict[str, Any]) -> bool:
    # The fused update reads a parameter, its gradient and its state in the order of memory, so their strides must be
    # equal. Torch allocates the state with the strides of empty_like.
    return (
        "fused" in group
        and group["fused"] is None
        and not group["foreach"]
        and all(
            p.device.type == "cpu" and p.is_floating_point() and torch.empty_like(p).stride() == p.stride()
            for p in group["params"]
        )
    )


@torch.no_grad()
def lay_gradients_out(parameters: Iterable[nn.Parameter]) -> None:
    """Give every gradient the strides of its parameter, which torch's fused updates expect and do not check.

    Hooks of the optimizer cannot do this, because they run before the closure that computes the gradients.

    Args:
        parameters: with the gradients of the step to be taken; those without one are left.
    """
    for p in parameters:
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
