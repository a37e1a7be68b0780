"""Lets torch's optimizers update the weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cfl.runtime.errors import ConfigError

_FUSED = (torch.float32, torch.float64)
"""Types of parameters with which torch's fused update on CPUs is right; with half precision it is not."""


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
            p.device.type == "cpu" and p.dtype in _FUSED and torch.empty_like(p).stride() == p.stride()
            for p in group["params"]
        )
    )


def check_shape(parameter: Tensor, gradient: Tensor | None) -> None:
    """Refuse a gradient of another shape than its parameter.

    Autograd computes one if the network has kept an activation of an earlier cohort, with another number of clients.
    Torch's fused updates would read beyond its end.

    Raises:
        ConfigError: the shapes differ.
    """
    if gradient is not None and gradient.shape != parameter.shape:
        valid = "one that keeps no activation between steps (self.x = h): gradients of another cohort come back with it"
        value = f"a network whose gradient is {list(gradient.shape)}, not {list(parameter.shape)}"
        raise ConfigError("model.network", value, valid)


@torch.no_grad()
def lay_gradients_out(parameters: Iterable[nn.Parameter]) -> None:
    """Give every gradient the strides of its parameter, which torch's fused updates expect and do not check.

    Hooks of the optimizer cannot do this, because they run before the closure that computes the gradients.

    Args:
        parameters: with the gradients of the step to be taken; those without one are left.

    Raises:
        ConfigError: as :func:`check_shape`.
    """
    for p in parameters:
        check_shape(p, p.grad)
        if p.grad is not None and p.grad.stride() != p.stride():
            p.grad = torch.empty_like(p).copy_(p.grad)
