"""The cohort width, the number of clients trained side by side, changes speed only."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import (
    MOMENTUM,
    ConvNet,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    unequal,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.federation.federation import Federation
from cfl.methods.personal import PersonalLayers
from cfl.models import Network

CLIENTS = 7
ADAM = partial(torch.optim.Adam, lr=0.02, weight_decay=0.01)


def kept_by_clients(federation: Federation) -> dict[str, Tensor]:
    return {
        f"{name} of {client}": tensor
        for client in range(CLIENTS)
        for name, tensor in (federation.clients.get("model", client) or {}).items()
    }


def assert_widths_agree(
    make_data: Callable[[int], FederatedDataModule],
    network: Any,
    optimizer: Any,
    tolerance: float = 1e-10,
    federated: dict[str, Any] | None = None,
    personal: list[str] | None = None,
    **trainer: Any,
) -> None:
    runs = []
    for width in (1, 3, CLIENTS):
        data = make_data(width)
        methods = None if personal is None else {"personal": PersonalLayers(personal)}
        client = tiny_client(data, network, optimizer, methods)
        initial = {name: tensor.clone() for name, tensor in client.network.state_dict().items()}
        federation = fit(client, data, federated, **trainer)
        assert client.require_cohort().width == min(width, len(federation.schedule.round(0).clients))
        runs.append(federation)
    alone = runs[0]
    reference = {**weights(alone), **kept_by_clients(alone)}
    assert any(not torch.equal(value, reference[name]) for name, value in initial.items()) or personal == ["*"]
    for other in runs[1:]:
        found = {**weights(other), **kept_by_clients(other)}
        torch.testing.assert_close(found, reference, rtol=0, atol=tolerance)
        assert torch.equal(other.accuracy.counts, alone.accuracy.counts)
        if tolerance < 1e-8:
            assert torch.equal(other.accuracy.sums, alone.accuracy.sums)
        assert other.channel.uplink_bytes == alone.channel.uplink_bytes
        assert other.channel.downlink_bytes == alone.channel.downlink_bytes


def test_the_clients_are_unequal() -> None:
    """The clients of the tests below differ in size and in the size of their last batches."""
    data = unequal(3)
    remainders = set()
    for task in data.indices:
        sizes = sorted(len(own) for own in task.values())
        assert sizes[-1] > 4 * sizes[0]
        remainders |= {size % 4 for size in sizes}
    assert remainders == {0, 1, 2, 3}, "last batches of every size, also of a single sample"


@pytest.mark.parametrize("optimizer", [sgd, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
def test_optimizers(optimizer: Any) -> None:
    assert_widths_agree(unequal, double(mlp), optimizer)


@pytest.mark.parametrize(
    "schedule",
    [{"local_epochs": 3}, {"batch_size": 3, "drop_last": True}, {"clients_per_round": 5}, {"batch_size": 100}],
    ids=str,
)
def test_schedules(schedule: dict[str, Any]) -> None:
    assert_widths_agree(lambda width: unequal(width, **schedule), double(mlp), MOMENTUM)


def test_weights_by_samples() -> None:
    assert_widths_agree(unequal, double(mlp), MOMENTUM, federated={"client_weighting": "samples"})


@pytest.mark.parametrize("options", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
def test_gradient_clipping(options: dict[str, Any]) -> None:
    value = 0.02 if options else 0.3
    assert_widths_agree(unequal, double(mlp), MOMENTUM, gradient_clip_val=value, **options)


class Summed(Network):
    """A network whose first weight is a sum of two parameters, whose gradients are the same."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        self.one, self.other = (nn.Parameter(torch.randn(6, math.prod(input_shape)) / 10) for _ in range(2))
        self.head = nn.Linear(6, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(x.flatten(1), self.one + self.other))


@pytest.mark.parametrize("clip", [0.3, 0.05])
def test_gradients_of_a_sum_are_clipped_once(clip: float) -> None:
    """Autograd may give both parts of a sum the same memory."""
    assert_widths_agree(unequal, double(Summed), MOMENTUM, gradient_clip_val=clip)


def test_a_convolutional_network() -> None:
    assert_widths_agree(unequal, double(ConvNet), MOMENTUM)


@pytest.mark.parametrize("batchnorm", ["average", "local", "drop"])
def test_batchnorm_with_its_running_statistics(batchnorm: str) -> None:
    assert_widths_agree(
        lambda width: unequal(width, local_epochs=2), double(norm_net), MOMENTUM, federated={"batchnorm": batchnorm}
    )


@pytest.mark.parametrize(("scenario", "class_loss"), [("task", "all"), ("class", "seen")])
def test_tasks_with_outputs_of_their_own(scenario: Any, class_loss: str) -> None:
    def data(width: int) -> FederatedDataModule:
        made = unequal(width, split(train=120))
        return tiny_data(
            made.stream,
            num_clients=CLIENTS,
            partition=made.partition,
            scenario=scenario,
            class_loss=class_loss,
            schedule={"rounds_per_task": 2, "batch_size": 4, "cohort_width": width},
        )

    assert_widths_agree(data, double(mlp), ADAM)


@pytest.mark.parametrize("layers", [["*"], ["head.*"], ["fc_norm.*"]], ids=str)
def test_personal_layers(layers: list[str]) -> None:
    assert_widths_agree(lambda width: unequal(width, clients_per_round=4), double(norm_net), MOMENTUM, personal=layers)


def test_in_float32() -> None:
    """In float32, the precision of real runs, widths differ by rounding only."""
    assert_widths_agree(lambda width: unequal(width, permuted(3)), mlp, MOMENTUM, tolerance=1e-5)
