"""Stacked layers compared with each client's own layers, and the engine's SGD step with the optimizer's."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from support.tiny import DECAY, ConvNet, double, dropping, fit, tiny_client, unequal, weights
from torch import Tensor, nn
from torch.func import vmap

from cfl.engines import EngineOptions, patches, vmapped
from cfl.engines.chain import Chain
from cfl.engines.stacked_layers import StackedLayers
from cfl.engines.updates import sgd_step
from cfl.engines.vmapped import VmapEngine
from cfl.models.base import Network


class Twice(Network):
    """Uses a weight twice, so it is no chain."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.first, self.again = nn.Linear(math.prod(input_shape), 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(torch.tanh(self.again(self.first(x.flatten(1))))))


class Halving(Callback):
    """Halves the learning rate in every round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] /= 2


GEOMETRIES = [  # kernel, stride, padding, dilation
    ((3, 3), 1, 0, 1),
    ((3, 3), 2, 1, 1),
    ((3, 3), 1, 2, 2),
    ((3, 2), (2, 1), (1, 0), (1, 2)),
    ((1, 1), 1, 0, 1),
    ((1, 1), 2, 0, 1),
    ((3, 3), 1, "same", 1),
]


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("large", [False, True], ids=["patches", "too many patches"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_and_gradients_are_every_clients_own(
    monkeypatch: pytest.MonkeyPatch, geometry: Any, bias: bool, large: bool
) -> None:
    """Stacked convolutions and products agree with loops over three clients. Gradients have their weights' strides."""
    if large:
        monkeypatch.setattr(patches, "MOST_PATCH_BYTES", 0)
    torch.manual_seed(0)
    kernel, *rest = geometry
    given = [_drawn(3, 4, 5, 11, 9), _drawn(3, 6, 5, *kernel), _drawn(3, 8, 6), *([_drawn(3, 6)] if bias else [])]

    def values(x: Tensor, w: Tensor, v: Tensor, b: Tensor | None = None) -> Tensor:
        maps = torch.tanh(F.conv2d(x, w, b, *rest)).movedim(1, -1)
        return F.linear(maps, v, torch.ones(8, dtype=torch.float64)).square().sum()

    factors = torch.arange(1, 4)
    with StackedLayers():
        stacked = vmap(values)(*given)
    apart = torch.stack([values(*(tensor[row] for tensor in given)) for row in range(3)])
    torch.testing.assert_close(stacked, apart, rtol=1e-12, atol=0)
    found = torch.autograd.grad((stacked * factors).sum(), given)
    expected = torch.autograd.grad((apart * factors).sum(), given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    if not large and not isinstance(rest[1], str):
        assert all(gradient.stride() == weight.stride() for gradient, weight in zip(found[1:], given[1:], strict=True))


def test_what_is_behind_a_convolution_may_change_its_maps_in_place() -> None:
    given = [_drawn(3, 2, 5, 6, 6), _drawn(3, 4, 5, 3, 3)]

    def values(x: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w), inplace=True).square().sum()

    with StackedLayers():
        stacked = vmap(values)(*given)
    apart = torch.stack([values(*(tensor[row] for tensor in given)) for row in range(3)])
    torch.testing.assert_close(stacked, apart)
    found, expected = (torch.autograd.grad(of.sum(), given) for of in (stacked, apart))
    torch.testing.assert_close(found, expected)


def test_weights_that_are_not_mapped_serve_every_client() -> None:
    x, w = _drawn(3, 2, 5, 6, 6), _drawn(4, 5, 3, 3)
    with StackedLayers():
        found = vmap(lambda of_one: F.conv2d(of_one, w))(x)
    torch.testing.assert_close(found, torch.stack([F.conv2d(of_one, w) for of_one in x]))


def test_a_product_steps_as_soon_as_its_gradient_is_known() -> None:
    """Backward moves a weight to w - lr (g + decay w) and leaves no gradient. Input gradients use the old weights."""
    x, w, v = _drawn(3, 4, 5), _drawn(3, 6, 5), _drawn(3, 2, 6)

    def losses(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, w)), v).square().sum()

    before = [w.detach().clone(), v.detach().clone()]
    expected = torch.autograd.grad(vmap(losses)(x, w, v).sum(), [x, w, v])
    with StackedLayers(sgd=(0.1, 0.05)):
        found = torch.autograd.grad(vmap(losses)(x, w, v).sum(), [x, w, v], allow_unused=True)
    assert found[1] is None
    assert found[2] is None
    torch.testing.assert_close(found[0], expected[0])
    for weight, old, gradient in zip((w, v), before, expected[1:], strict=True):
        torch.testing.assert_close(weight.detach(), old - 0.1 * (gradient + 0.05 * old))


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_a_step_of_sgd_at_once_is_the_equation(decay: float) -> None:
    """The step is w - lr (g + decay w), also for gradients with other strides. Weights without a gradient stay."""
    torch.manual_seed(0)
    ours = [_drawn(3, 4, 5), _drawn(3, 2)]
    before = [weight.detach().clone() for weight in ours]
    gradient = torch.randn(3, 5, 4, dtype=torch.float64).transpose(1, 2)
    sgd_step(ours, [gradient, None], 0.1, decay)
    torch.testing.assert_close(ours[0].detach(), before[0] - 0.1 * (gradient + decay * before[0]))
    assert torch.equal(ours[1].detach(), before[1])


def as_on_cuda(monkeypatch: pytest.MonkeyPatch, layers: bool = True) -> Mock:
    """Let engines take SGD's step themselves and compute stacked layers. Returns the mock that records these steps."""
    build = VmapEngine.__init__

    def built(self: VmapEngine, *args: Any) -> None:
        build(self, *args)
        self.fuses_sgd, self._stacked_layers = True, layers
        self._is_chain = layers and Chain.of(self.network) is not None

    steps = Mock(wraps=sgd_step)
    monkeypatch.setattr(VmapEngine, "__init__", built)
    monkeypatch.setattr(vmapped, "sgd_step", steps)
    return steps


@pytest.mark.parametrize("changing", [False, True], ids=["one rate", "a rate a round"])
@pytest.mark.parametrize("network", [dropping, ConvNet, Twice], ids=["dropout", "conv", "no chain"])
@pytest.mark.parametrize("width", [1, 3])
def test_an_engine_that_steps_at_once_trains_as_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, network: Any, width: int, changing: bool
) -> None:
    """Stacked layers and the engine's own step, which are the rule on CUDA, train to the optimizer's weights."""

    def trained() -> dict[str, Tensor]:
        data = unequal(width)
        client = tiny_client(data, double(network), DECAY, None, EngineOptions("vmap"))
        return weights(fit(client, data, callbacks=[Halving()] if changing else []))

    expected = trained()
    steps = as_on_cuda(monkeypatch)
    found = trained()
    assert steps.called
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_mixed_precision_lightning_takes_the_step(monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    """In mixed precision Lightning takes the step, because it scales losses and skips steps that overflow."""
    steps = as_on_cuda(monkeypatch, layers=False)
    data = unequal(3)
    fit(tiny_client(data, dropping, DECAY, None, EngineOptions("vmap")), data, precision=precision)
    assert steps.called == (precision == "32-true")
