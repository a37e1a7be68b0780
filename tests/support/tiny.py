"""A tiny federation: made-up images, networks of a few hundred weights, a whole run in a twentieth of a second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.scenarios import EVERY_SCENARIO
from cfl.data.sources import Synthetic
from cfl.data.streams import Stream
from cfl.data.types import ImageSet
from cfl.engines import EngineOptions, products
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.models import MLP, Network, PromptedViT
from cfl.testing.tiny_data import permuted, source, split, tiny_data, unequal
from cfl.testing.tiny_networks import ConvNet, NetworkFactory, double, mlp, norm_net
from cfl.testing.tiny_runs import Rounds, fit, sgd, tiny_client, tiny_trainer, weights
from cfl.training.client import Client

__all__ = [
    "CONV_INPUTS",
    "CONV_LAYERS",
    "DECAY",
    "MLP_INPUTS",
    "MLP_LAYERS",
    "MOMENTUM",
    "UNBALANCED",
    "UNEQUAL",
    "ConvNet",
    "NetworkFactory",
    "Owned",
    "Poison",
    "PoolNet",
    "Rounds",
    "SaveAfter",
    "StridedNet",
    "deep_mlp",
    "double",
    "dropping",
    "fit",
    "five_unequal",
    "kept_by",
    "mlp",
    "needs_onednn",
    "norm_net",
    "permuted",
    "prompted_net",
    "runs_in_double",
    "sgd",
    "source",
    "split",
    "tiny_client",
    "tiny_data",
    "tiny_trainer",
    "unequal",
    "weights",
]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

needs_onednn = pytest.mark.skipif(not products.available(), reason="this build of torch has no oneDNN")


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


class Owned(Synthetic):
    """A source whose training samples, and test samples if ``tests``, belong to five clients of unequal sizes."""

    def __init__(self, tests: bool = True) -> None:
        super().__init__(4, [1, 4, 4], 80, 60, noise=60.0)
        self.tests = tests

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        train, test = super().read(root)
        owners = [torch.arange(len(part)) ** 2 % 97 % 5 for part in (train, test)]
        return replace(train, clients=owners[0]), replace(test, clients=owners[1]) if self.tests else test


class SaveAfter(Callback):
    """Writes a checkpoint after one round."""

    def __init__(self, round: int, path: Path) -> None:
        self.round, self.path = round, path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Client) -> None:
        if trainer.current_epoch == self.round:
            trainer.save_checkpoint(self.path)


class Poison(Method):
    """Makes a gradient of one client NaN, in one round or in all."""

    scenarios = EVERY_SCENARIO
    task_free = client_clocks = True

    def __init__(self, client: int, round: int | None = None, parameter: str = "head.bias") -> None:
        self.client, self.round, self.parameter = client, round, parameter

    def adjust_gradients(self, cohort: Cohort) -> None:
        if self.client in cohort.clients and self.round in (None, cohort.round):
            cohort.gradients[self.parameter][cohort.clients.index(self.client)] = torch.nan


def kept_by(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """Client -> copies of the tensors that it keeps."""
    return {c: federation.clients.get("model", c) or {} for c in federation.clients.holders("model")}


DECAY = partial(torch.optim.SGD, lr=0.1, weight_decay=0.05)


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


dropping = partial(MLP, hidden=[12, 8], dropout=[0.2, 0.5])


deep_mlp: NetworkFactory = partial(MLP, hidden=[10, 7], dropout=0.0)
MLP_INPUTS = {"layers.0": 16, "layers.1": 10, "head": 7}
CONV_INPUTS = {"conv1": 9, "conv2": 18, "fc": 8, "head": 6}
"""Sizes of the inputs of the layers of deep_mlp and of StridedNet."""
MLP_LAYERS, CONV_LAYERS = list(MLP_INPUTS), list(CONV_INPUTS)


UNEQUAL = Dirichlet(1.0, 3)
UNBALANCED = Dirichlet(0.5, 3, balance=False)


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


def five_unequal(
    stream: Stream | None = None, width: int = 2, *, schedule: Mapping[str, Any] | None = None, **options: Any
) -> FederatedDataModule:
    """Five unequal clients, three per round, unless said otherwise; arguments as for :func:`tiny_data`."""
    settings = {"num_clients": 5, "partition": UNEQUAL, **options}
    return tiny_data(stream, schedule={"clients_per_round": 3, "cohort_width": width, **(schedule or {})}, **settings)


def at_round(data: FederatedDataModule, number: int) -> None:
    """Let ``data`` be those of one round from now on, as if a federation had reached it."""
    data.follow(SimpleNamespace(round=number))


def runs_in_double(data_of: Callable[[], FederatedDataModule]) -> Callable[..., Federation]:
    """Return a function that runs methods in float64, on the data of ``data_of`` or on given ones.

    Args:
        data_of: makes the data if none are given.
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
