"""A tiny federation: made-up images, networks of a few hundred weights, a whole run in a twentieth of a second."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from cfl.callbacks import FederatedOrchestrator
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import Schedule
from cfl.data.sources import Synthetic
from cfl.data.streams import ClassSplit, Permuted, Stream
from cfl.engines import EngineOptions, products
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.models import MLP, Network, PromptedViT
from cfl.training.client import Client

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

NetworkFactory = Callable[[tuple[int, int, int], int], Network]
sgd = partial(torch.optim.SGD, lr=0.1)
needs_onednn = pytest.mark.skipif(not products.available(), reason="this build of torch has no oneDNN")


def source(classes: int = 4, train: int = 80, test: int = 40) -> Synthetic:
    """4 x 4 grey images, hard enough that accuracies are neither chance nor 100 %."""
    return Synthetic(classes, [1, 4, 4], train, test, noise=60.0)


def permuted(tasks: int = 2, **of_source: int) -> Permuted:
    """Domain-incremental: 4 classes, pixels permuted."""
    return Permuted(source(**of_source), tasks)


def split(tasks: int = 2, **of_source: int) -> ClassSplit:
    """Task- or class-incremental: the classes of the source divided over the tasks."""
    return ClassSplit(source(**of_source), tasks)


def tiny_data(
    stream: Stream | None = None, *, num_clients: int = 4, schedule: Mapping[str, Any] | None = None, **options: Any
) -> FederatedDataModule:
    """Two permuted tasks of three rounds with all of four clients, unless said otherwise.

    Args:
        stream: the tasks.
        num_clients: number of clients.
        schedule: options of ``cfl.data.schedule.Schedule``.
        options: of ``FederatedDataModule``.
    """
    settings = {
        "rounds_per_task": 3,
        "clients_per_round": 1.0,
        "batch_size": 8,
        "cohort_width": 10,
        **(schedule or {}),
    }
    return FederatedDataModule(stream or permuted(), Schedule(**settings), num_clients=num_clients, **options)


mlp: NetworkFactory = partial(MLP, hidden=[8], dropout=0.0)


class ConvNet(Network):
    """A convolution and a linear layer, each with BatchNorm if wanted, and the head: about 100 weights."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, norm: bool = False) -> None:
        super().__init__(input_shape, num_outputs)
        channels, height, width = input_shape
        self.conv = nn.Conv2d(channels, 2, 3)
        self.conv_norm = nn.BatchNorm2d(2) if norm else nn.Identity()
        self.fc = nn.Linear(2 * (height - 2) * (width - 2), 5)
        self.fc_norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.head = nn.Linear(5, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv_norm(self.conv(x)))
        return torch.relu(self.fc_norm(self.fc(x.flatten(1))))


prompted_net = partial(
    PromptedViT,
    pool_size=4,
    prompt_length=2,
    top_k=2,
    image_size=8,
    patch_size=4,
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    mlp_dim=8,
)
norm_net: NetworkFactory = partial(ConvNet, norm=True)


class StridedNet(Network):
    """Convolutions with stride, padding and without bias, dropout, a linear layer, the head: some 200 weights."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, dropout: float = 0.0) -> None:
        super().__init__(input_shape, num_outputs)
        self.conv1 = nn.Conv2d(input_shape[0], 3, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(1, 0), bias=False)
        self.dropout = nn.Dropout(dropout)
        side = [(size - 1) // 2 + 1 for size in input_shape[1:]]
        self.fc = nn.Linear(4 * side[0] * (side[1] // 2), 6)
        self.head = nn.Linear(6, num_outputs)

    def features(self, x: Tensor) -> Tensor:
        x = self.dropout(torch.relu(self.conv2(torch.relu(self.conv1(x)))))
        return torch.relu(self.fc(x.flatten(1)))


def double(make: NetworkFactory) -> NetworkFactory:
    """The same network in float64, so that two computations can be compared to ten digits."""

    def build(input_shape: tuple[int, int, int], num_outputs: int) -> Network:
        network = make(input_shape, num_outputs).double()
        network.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        return network

    return build


def tiny_client(
    data: FederatedDataModule,
    network: NetworkFactory = mlp,
    optimizer: Any = sgd,
    methods: dict[str, Method] | None = None,
    engine: EngineOptions | None = None,
) -> Client:
    """The Client for these data, under the data's seed; its steps are computed by vmap unless said otherwise."""
    engine = EngineOptions("vmap") if engine is None else engine
    return Client(network, optimizer, methods, data.input_shape, data.num_outputs, data.seed, engine)


def tiny_trainer(
    data: FederatedDataModule,
    federated: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """A silent Trainer on the CPU.

    Args:
        data: says how many rounds there are.
        federated: options of ``FederatedOrchestrator``.
        callbacks: further callbacks, behind the orchestrator.
        options: of ``Trainer``.
    """
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": -1,
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "max_epochs": data.num_rounds,
        "callbacks": [FederatedOrchestrator(**(federated or {})), *callbacks],
    }
    return Trainer(**{**settings, **options})


def fit(
    client: Client,
    data: FederatedDataModule,
    federated: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    ckpt_path: Any = None,
    **options: Any,
) -> Federation:
    """Run all rounds and return what is left; arguments as for :func:`tiny_trainer`."""
    trainer = tiny_trainer(data, federated, callbacks, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        trainer.fit(client, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    assert client.federation is not None
    return client.federation


def weights(federation: Federation) -> dict[str, Tensor]:
    """A copy of the global model: parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in federation.state_tensors().items()}


class Rounds(Callback):
    """Keeps the global model as it is after every round."""

    def __init__(self) -> None:
        self.models: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:
        assert pl_module.federation is not None
        self.models.append(weights(pl_module.federation))


class SaveAfter(Callback):
    """Writes a checkpoint after one round."""

    def __init__(self, round: int, path: Path) -> None:
        self.round, self.path = round, path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:
        if trainer.current_epoch == self.round:
            trainer.save_checkpoint(self.path)


def kept_by(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """What every client keeps, copied."""
    return {c: federation.clients.get("model", c) or {} for c in federation.clients.holders("model")}


DECAY = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


dropping = partial(MLP, hidden=[12, 8], dropout=[0.2, 0.5])


class PoolNet(Network):
    """Padding and dilation, dropped maps, and dropped units behind a pooling with overlaps and a column left over."""

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs)
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 3, 3, padding=2, dilation=(1, 2))
        self.conv2 = nn.Conv2d(3, 4, 2, bias=False)
        self.maps, self.units = nn.Dropout2d(0.3), nn.Dropout(0.4)
        self.head = nn.Linear(4 * (height // 2) * ((width - 1) // 2), num_outputs)

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.maps(self.conv1(x)))))
        return self.units(nn.functional.max_pool2d(x, (3, 2), 2)).flatten(1)


def unequal(width: int, stream: Any = None, **schedule: Any) -> FederatedDataModule:
    """Seven clients of 4 to 24 samples in batches of 4: partial batches, clients that finish early."""
    return tiny_data(
        stream,
        num_clients=7,
        partition=Dirichlet(alpha=0.5, min_samples=3, balance=False),
        schedule={"rounds_per_task": 2, "batch_size": 4, "cohort_width": width, **schedule},
    )


def five_unequal(
    stream: Stream | None = None, width: int = 2, *, schedule: Mapping[str, Any] | None = None, **options: Any
) -> FederatedDataModule:
    """Five unequal clients, three per round, unless said otherwise; arguments as for :func:`tiny_data`."""
    settings = {"num_clients": 5, "partition": Dirichlet(1.0, 3), **options}
    return tiny_data(stream, schedule={"clients_per_round": 3, "cohort_width": width, **(schedule or {})}, **settings)


def runs_in_double(data_of: Callable[[], FederatedDataModule]) -> Callable[..., Federation]:
    """A function that runs methods in float64, on data of its own or on others.

    Args:
        data_of: makes the data where none are given.
    """

    def run(
        methods: Mapping[str, Method] | None = None,
        data: FederatedDataModule | None = None,
        network: NetworkFactory = mlp,
        optimizer: Any = sgd,
        engine: EngineOptions | None = None,
        **options: Any,
    ) -> Federation:
        data = data_of() if data is None else data
        return fit(tiny_client(data, double(network), optimizer, dict(methods or {}), engine), data, **options)

    return run
