"""Lets torch's optimizers update the weights in one pass over memory."""

from __future__ import annotations

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
    parameters on other devices, keep torch's default. Before each step, call :func:`prepare_step`.

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
def prepare_step(optimizer: Optimizer) -> None:
    """Meet what torch's fused updates expect of gradients and of the optimizer's state, and do not check.

    Every gradient gets the strides of its parameter. With SGD and momentum, a parameter whose first gradient comes
    later than that of others gets a momentum buffer.

    Hooks of the optimizer cannot do this, because they run before the closure that computes the gradients.

    Args:
        optimizer: with the gradients of the step to be taken.

    Raises:
        ConfigError: as :func:`check_shape`.
    """
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            check_shape(p, p.grad)
            if p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
        if group.get("fused") and group.get("momentum"):
            late = [p for p in parameters if optimizer.state[p].get("momentum_buffer") is None]
            if len(late) < len(parameters):
                for p in late:
                    optimizer.state[p]["momentum_buffer"] = _before_first_gradient(p, group)


def _before_first_gradient(p: nn.Parameter, group: dict[str, Any]) -> Tensor:
    """The buffer b with which the fused update ``b <- momentum b + (1 - dampening) g`` gives g, as torch starts it."""
    if not group["dampening"]:
        return torch.zeros_like(p)
    assert p.grad is not None
    gradient = (-p.grad if group["maximize"] else p.grad).add(p, alpha=group["weight_decay"])
    return torch.empty_like(p).copy_(gradient * (group["dampening"] / group["momentum"]))
