"""Whole runs compared with federated averaging written as a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.naive import federated_averaging, plain_network
from support.tiny import (
    UNEQUAL,
    NetworkFactory,
    SaveAfter,
    double,
    dropping,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Holders, RandomShare
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import BoundSchedule
from cfl.data.sequences import FixedTasks
from cfl.data.streams import Stream
from cfl.models import MLP
from cfl.testing.comparing import difference
from cfl.training.client import Client

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.02, weight_decay=0.01)


def assert_same_run(
    data: FederatedDataModule,
    make: NetworkFactory,
    optimizer: Any,
    federated: dict[str, Any] | None = None,
    tolerance: float = 1e-10,
    trainer: dict[str, Any] | None = None,
    **naive: Any,
) -> None:
    """Assert that a run and the plain loop end with the same global model."""
    client = tiny_client(data, make, optimizer)
    network = plain_network(data, make, client.network.state_dict())
    expected, _ = federated_averaging(network, data, optimizer, **naive)
    found = weights(fit(client, data, federated, **(trainer or {})))
    assert set(found) == set(expected)
    moved = [not torch.equal(expected[name], value) for name, value in network.named_parameters()]
    assert all(moved)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def unequal_data(stream: Stream | None = None, **options: Any) -> FederatedDataModule:
    """Two tasks of three rounds with three of five clients of 3 to 30 samples, two local epochs, partial batches."""
    schedule = {"clients_per_round": 3, "local_epochs": 2, "cohort_width": 2}
    return tiny_data(stream, num_clients=5, partition=UNEQUAL, schedule=schedule, **options)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_run_is_federated_averaging(optimizer: Any, weighting: str) -> None:
    data = unequal_data()
    sizes = {len(own) for task in data.indices for own in task.values()}
    assert len(sizes) > 3
    assert any(size % data.schedule.batch_size for size in sizes)
    assert_same_run(data, double(mlp), optimizer, {"client_weighting": weighting}, by_samples=weighting == "samples")


def test_in_float32_as_well() -> None:
    """In float32, the precision of real runs, only rounding differs."""
    assert_same_run(unequal_data(), mlp, SGD, tolerance=1e-5)


@pytest.mark.parametrize(("lr", "momentum"), [(0.5, 0.0), (1.0, 0.9), (0.7, 0.6)])
def test_the_servers_learning_rate_and_momentum(lr: float, momentum: float) -> None:
    assert_same_run(
        unequal_data(),
        double(mlp),
        sgd,
        {"server_lr": lr, "server_momentum": momentum},
        server_lr=lr,
        server_momentum=momentum,
    )


@pytest.mark.parametrize("width", [1, 2])
def test_outputs_of_a_client_that_drops_out_are_not_moved_by_momentum(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum does not move the outputs of a client that drops out, as if the client had not been sampled.

    Two clients have outputs of their own, and one of them drops out of the second round.
    """
    monkeypatch.setattr(BoundSchedule, "dropouts", lambda self, number: frozenset([1] if number == 1 else []))
    schedule = {"clients_per_round": 2, "cohort_width": width, "client_dropout": 0.5}
    data = tiny_data(split(2), num_clients=2, sequences=FixedTasks([[0], [1]]), scenario="task", schedule=schedule)
    client, heads = tiny_client(data), []

    class Heads(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            heads.append(client.network.head.weight.detach().clone())

    fit(client, data, {"server_momentum": 0.9}, callbacks=[Heads()])
    moved = (heads[1] - heads[0]).abs().amax(1) > 0
    assert moved.tolist() == [True, True, False, False]


def test_batchnorm_statistics_are_averaged_like_weights() -> None:
    data = tiny_data(num_clients=5, partition=UNEQUAL, schedule={"batch_size": 7, "clients_per_round": 3})
    lasts = {len(own) % 7 for task in data.indices for own in task.values()}
    assert len(lasts) > 3
    assert 1 not in lasts  # ordinary BatchNorm refuses a batch of one sample
    assert_same_run(data, double(norm_net), SGD, {"client_weighting": "samples"}, by_samples=True)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_every_client_clips_its_own_gradient(algorithm: str) -> None:
    """Clipping uses the norm of one client's whole gradient, not of a layer's or of a whole cohort's."""
    threshold = 1.5 if algorithm == "norm" else 0.02
    clip = getattr(torch.nn.utils, f"clip_grad_{algorithm}_")
    clipped = []

    def change(network: nn.Module, client: int) -> None:
        gradients = [parameter.grad for parameter in network.parameters()]
        size = torch.nn.utils.get_total_norm(gradients, 2.0 if algorithm == "norm" else float("inf"))
        clipped.append(bool(size > threshold))
        clip(network.parameters(), threshold)

    trainer = {"gradient_clip_val": threshold, "gradient_clip_algorithm": algorithm}
    assert_same_run(unequal_data(), double(mlp), sgd, trainer=trainer, change_gradients=change)
    assert any(clipped)
    if algorithm == "norm":
        assert not all(clipped)


class Scaled(MLP):
    """An MLP with a parameter without dimensions."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, hidden=[8], dropout=0.0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def features(self, x: Tensor) -> Tensor:
        return self.scale * super().features(x)


def test_a_parameter_without_dimensions() -> None:
    def clip(network: nn.Module, client: int) -> None:
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)

    assert_same_run(unequal_data(), double(Scaled), SGD, trainer={"gradient_clip_val": 1.0}, change_gradients=clip)


@pytest.mark.parametrize(
    ("scenario", "class_loss"),
    [("task", "all"), ("class", "all"), ("class", "seen"), ("class", "own"), ("domain", "all")],
)
def test_outputs_of_other_tasks(scenario: Any, class_loss: str) -> None:
    """Runs agree with a plain loop in which weight decay, momentum and Adam do not change outputs outside the loss."""
    for optimizer in (SGD, ADAM):
        assert_same_run(unequal_data(split(), scenario=scenario, class_loss=class_loss), double(mlp), optimizer)


class FadingHead(nn.Linear):
    """A linear layer with a factor per output that becomes smaller in every training step."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("factor", torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.factor.mul_(0.99)
        return super().forward(x) * self.factor


class Fading(MLP):
    """An MLP with such a head."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, hidden=[8], dropout=0.0)
        self.head = FadingHead(8, num_outputs)


def test_a_buffer_per_output_is_averaged_like_other_buffers() -> None:
    """Also that of outputs outside the loss, because forward passes compute and change it."""
    assert_same_run(unequal_data(split(), scenario="task"), double(Fading), SGD)


@pytest.mark.filterwarnings("ignore:Found 1 module.* in eval mode")
def test_the_same_client_goes_on_in_training_mode_after_an_error_in_an_evaluation(tmp_path: Path) -> None:
    """A part that was in evaluation mode from the beginning stays so."""

    class FailsInTest(Callback):
        def on_validation_batch_end(self, trainer: Any, *given: Any) -> None:
            if not trainer.sanity_checking and trainer.current_epoch > 1:
                raise InterruptedError

    def client(data: FederatedDataModule) -> Client:
        made = tiny_client(data, dropping)
        assert isinstance(made.network, MLP)
        made.network.dropouts[1].eval()
        return made

    data = tiny_data()
    expected = weights(fit(client(data), data))
    data = tiny_data()
    same = client(data)
    with pytest.raises(InterruptedError):
        fit(same, data, callbacks=[SaveAfter(1, tmp_path / "2.ckpt"), FailsInTest()])
    found = weights(fit(same, data, ckpt_path=tmp_path / "2.ckpt"))
    assert difference(found, expected) is None
    assert [name for name, module in same.network.named_modules() if not module.training] == ["dropouts.1"]


def test_clients_that_hold_only_some_tasks_and_rounds_of_different_numbers() -> None:
    data = tiny_data(
        permuted(3),
        num_clients=6,
        participation=RandomShare(0.5),
        schedule={"rounds_per_task": [1, 3, 2], "clients_per_round": 2, "drop_last": True},
    )
    assert len({tuple(members) for members in data.members}) > 1
    assert_same_run(data, double(mlp), SGD)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_clients_without_samples_of_some_tasks(weighting: str) -> None:
    data = tiny_data(
        permuted(3),
        num_clients=6,
        partition=Dirichlet(0.05, min_samples=0, balance=False),
        participation=Holders(),
        schedule={"clients_per_round": 0.6, "local_epochs": 2, "cohort_width": 2},
    )
    assert len({tuple(members) for members in data.members}) > 1
    assert_same_run(data, double(mlp), SGD, {"client_weighting": weighting}, by_samples=weighting == "samples")
