"""Lets torch's optimizers update the weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def step_in_one_pass(optimizer: Optimizer) -> None:
    """Switch on an optimizer's fused update for parameters in the CPU's memory, unless its options say which to take.

    Torch's default there is one pass over memory per operation: Adam has about ten, in place of one. The fused update
    is the same up to rounding. Torch has it for SGD, Adam, AdamW and Adagrad; others are left as they are. On other
    devices torch's own default is left. Gradients have to go through :func:`lay_gradients_out`.

    Args:
        optimizer: before its first step.
    """
    for group in optimizer.param_groups:
        if _may_be_fused(group):
            group["fused"] = True


def _may_be_fused(group: dict[str, Any]) -> bool:
    # The fused update reads a parameter, its gradient and its state, which torch allocates like the parameter, by their
    # places in memory.
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

    No hook of the optimizer can do it: one runs before the closure in which the gradients are computed.

    Args:
        parameters: with the gradients of the step to be taken; those without one are left.
    """
    for p in parameters:
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
