"""Optimizers that update weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cfl.engines.one_pass import step_in_one_pass

FUSED: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.01, amsgrad=True),
    "Adagrad": partial(Adagrad, lr=0.01, lr_decay=0.1),
}


def after_steps(
    make: Callable[..., Optimizer], in_one_pass: bool, gradients: list[list[Tensor | None]]
) -> list[Tensor]:
    """Weights after a step along each row of ``gradients``; the second weight has the channels last in memory."""
    start = torch.Generator().manual_seed(1)
    shapes = [(3, 5, 7), (2, 4, 3, 6), (2,)]
    values = [torch.randn(*shape, generator=start, dtype=torch.float64) for shape in shapes]
    values[1] = values[1].contiguous(memory_format=torch.channels_last)
    weights = [nn.Parameter(value) for value in values]
    optimizer = make(weights)
    if in_one_pass:
        step_in_one_pass(optimizer)
        assert optimizer.param_groups[0]["fused"] is True
    for of_step in gradients:
        for weight, gradient in zip(weights, of_step, strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("name", FUSED)
def test_steps_are_those_of_the_optimizer_itself(name: str) -> None:
    """Also along gradients that lie in memory otherwise than their weights, or of which there are none."""
    draw = torch.Generator().manual_seed(2)
    gradients: list[list[Tensor | None]] = [
        [
            torch.randn(7, 5, 3, generator=draw, dtype=torch.float64).permute(2, 1, 0),
            torch.randn(2, 4, 3, 6, generator=draw, dtype=torch.float64),
            None if step == 1 else torch.randn(1, generator=draw, dtype=torch.float64).expand(2),
        ]
        for step in range(4)
    ]
    expected = after_steps(FUSED[name], False, gradients)
    for ours, theirs in zip(after_steps(FUSED[name], True, gradients), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        partial(Adam, fused=False),
        partial(Adam, foreach=True),
        RMSprop,
        lambda weights: Adam([weight.to("meta").detach().requires_grad_() for weight in weights]),
        lambda weights: SGD([nn.Parameter(torch.zeros(4, 4)[:, :2])], lr=0.1),
    ],
    ids=["not fused", "foreach", "no such update", "another device", "gaps in memory"],
)
def test_what_is_said_or_cannot_be_is_left(make: Any) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2))])
    before = {**optimizer.param_groups[0]}
    step_in_one_pass(optimizer)
    assert {**optimizer.param_groups[0]} == before
