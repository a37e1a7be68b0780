"""Initial weights: TensorFlow's variance scaling, for tensors and for LeNet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cfl.models import LeNet
from cfl.models.initial_weights import variance_scaled
from cfl.runtime.errors import ConfigError


@pytest.mark.parametrize("n", [20, 800])
def test_variance_scaling_of_a_vector(n: int) -> None:
    """Values have mean 0 and variance 1 / n, and lie within two deviations of the normal distribution that is cut."""
    draws = [variance_scaled(torch.zeros(n), torch.Generator().manual_seed(s)) for s in range(16000 // n)]
    values = torch.cat(draws)
    assert values.mean().item() == pytest.approx(0, abs=4 / math.sqrt(n * len(values)))
    assert values.var().item() * n == pytest.approx(1, rel=0.05)
    most = 2 / math.sqrt(n) / 0.8796
    assert 0.95 * most < values.abs().max().item() <= 1.0001 * most
    assert torch.equal(draws[0], variance_scaled(torch.ones(n), torch.Generator().manual_seed(0)))


def test_a_vector_of_nothing_is_nothing() -> None:
    values: Any = variance_scaled(torch.zeros(0))
    assert values.shape == (0,)


@pytest.mark.parametrize("shape", [(40, 50), (20, 4, 5, 5)])
def test_variance_scaling_counts_the_inputs_of_an_output(shape: tuple[int, ...]) -> None:
    n = math.prod(shape[1:])
    values = torch.cat([variance_scaled(torch.zeros(shape), torch.Generator().manual_seed(s)) for s in range(8)])
    assert values.var().item() * n == pytest.approx(1, rel=0.05)
    assert values.abs().max().item() <= 2.0001 / math.sqrt(n) / 0.8796


def test_lenet_starts_as_it_is_told() -> None:
    networks: dict[str, LeNet] = {}
    for initial in ("torch", "variance_scaling"):
        torch.manual_seed(0)
        networks[initial] = LeNet((3, 32, 32), 50, initial=initial)  # type: ignore[arg-type]
    for layer in ("conv1", "conv2", "fc1", "fc2", "head"):
        inputs = networks["torch"].get_submodule(layer).weight[0].numel()  # type: ignore[union-attr,operator,index]
        variances = {
            name: network.get_parameter(f"{layer}.weight").var().item() * inputs for name, network in networks.items()
        }
        assert variances == {"torch": pytest.approx(1 / 3, rel=0.1), "variance_scaling": pytest.approx(1, rel=0.1)}
    with pytest.raises(ConfigError, match="torch or variance_scaling"):
        LeNet((3, 8, 8), 5, initial="zeros")  # type: ignore[arg-type]
