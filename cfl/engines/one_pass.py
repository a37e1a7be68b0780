"""Lets torch's optimizers update the weights in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def step_in_one_pass(optimizer: Optimizer) -> None:
    """Switch on an optimizer's fused update for parameters in the CPU's memory, unless its options say which to take.

    Torch's default there is one pass over memory per operation: Adam has about ten, in place of one. The fused update
    is the same up to rounding. Torch has it for SGD, Adam, AdamW and Adagrad; others are left as they are. On other
    devices torch's own default is left.

    Args:
        optimizer: before its first step.
    """
    groups = [group for group in optimizer.param_groups if _may_be_fused(group)]
    for group in groups:
        group["fused"] = True
    if groups:
        optimizer.register_step_pre_hook(_lay_gradients_out)


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
def _lay_gradients_out(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Give every gradient the strides of its parameter, which torch's fused updates expect and do not check."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
