"""Optimizers that update weights in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.tiny import double, fit, mlp, tiny_client, tiny_data, weights
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cfl.engines import EngineOptions
from cfl.engines.cohort import Cohort
from cfl.engines.one_pass import prepare_step, step_in_one_pass
from cfl.methods import Method
from cfl.models import MLP
from cfl.runtime.errors import ConfigError, EngineCannot
from cfl.testing.tiny_runs import OneStepAtATime

FUSED: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.02, maximize=True),
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
        if in_one_pass:
            prepare_step(optimizer)
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("name", FUSED)
def test_steps_are_those_of_the_optimizer_itself(name: str, missing: int) -> None:
    """One-pass steps are those of the optimizer, also for gradients with other strides than the weights, or without."""
    draw = torch.Generator().manual_seed(2)
    gradients: list[list[Tensor | None]] = [
        [
            torch.randn(7, 5, 3, generator=draw, dtype=torch.float64).permute(2, 1, 0),
            torch.randn(2, 4, 3, 6, generator=draw, dtype=torch.float64),
            None if step == missing else torch.randn(1, generator=draw, dtype=torch.float64).expand(2),
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


class LaidOutOtherwise(Method):
    """Gives the gradients of matrices other strides with the same values."""

    adjusted = 0

    def adjust_gradients(self, cohort: Cohort) -> None:
        for parameter in cohort.parameters.values():
            if parameter.ndim == 3:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.transpose(1, 2).contiguous().transpose(1, 2)
                self.adjusted += parameter.grad.stride() != parameter.stride()


@pytest.mark.parametrize("callbacks", [[], [OneStepAtATime()]], ids=["blocks", "single steps"])
def test_a_run_does_not_depend_on_how_gradients_lie_in_memory(callbacks: list[Callback]) -> None:
    """Strides that a method gives to gradients do not change a run. Methods do so in the optimizer's closure."""
    otherwise, runs = LaidOutOtherwise(), []
    for methods in ({}, {"otherwise": otherwise}):
        data = tiny_data()
        client = tiny_client(data, double(mlp), partial(Adam, lr=0.02), dict[str, Method](methods))
        runs.append(weights(fit(client, data, callbacks=callbacks)))
    assert otherwise.adjusted
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-12)


def test_a_gradient_of_another_number_of_clients_is_refused() -> None:
    """Autograd makes one if a network keeps an activation; a fused update would read beyond its end."""
    parameter = nn.Parameter(torch.zeros(1, 6))
    parameter.grad = torch.zeros(1, 6)
    optimizer = SGD([parameter], lr=0.1)
    prepare_step(optimizer)
    parameter.data = torch.zeros(3, 6)
    with pytest.raises(ConfigError, match=r"model\.network = .* gradient is \[1, 6\], not \[3, 6\]' .*no activation"):
        prepare_step(optimizer)


class Chooses(MLP):
    """A network of which a sample's value says which layer is used."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def features(self, x: Tensor) -> Tensor:
        found = super().features(x)
        return (self.one if float(x.flatten()[0]) > 0 else self.other)(found)


def test_parameters_that_some_clients_of_a_step_use_are_refused_with_momentum() -> None:
    """Engine ``auto`` takes one that can, with the result of one client at a time."""

    def choosing(shape: tuple[int, int, int], outputs: int) -> nn.Module:
        return Chooses(shape, outputs, hidden=[6])

    def trained(engine: EngineOptions, width: Any) -> dict[str, Tensor]:
        data = tiny_data(num_clients=4, schedule={"clients_per_round": 4, "cohort_width": width})
        return weights(fit(tiny_client(data, double(choosing), partial(Adam, lr=0.02), {}, engine), data))

    with pytest.raises(EngineCannot, match=r"some clients of a step use (one|other)\.bias"):
        trained(EngineOptions("workers", 1, 1), 4)
    expected = trained(EngineOptions("workers", 1, 1), 1)
    torch.testing.assert_close(trained(EngineOptions("auto"), "auto"), expected, rtol=0, atol=1e-9)


def test_half_precision_keeps_torchs_default() -> None:
    for dtype, fused in ((torch.float32, True), (torch.bfloat16, None), (torch.float16, None)):
        optimizer = SGD([nn.Parameter(torch.zeros(20, dtype=dtype))], 0.1)
        step_in_one_pass(optimizer)
        assert optimizer.param_groups[0]["fused"] is fused
