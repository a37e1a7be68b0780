"""The works: what one round consists of, independent of the engine that computes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """One round of federated averaging: every sampled client takes one epoch of plain SGD over its samples.

    Attributes:
        name: W1, W2, ...
        title: in one line, for tables.
        network: class in ``cfl.models``.
        options: arguments of that class. Configurations merge, so these name every option that another one may set.
        shape: ``(C, H, W)`` of an image.
        clients: in the federation.
        sampled: per round.
        samples: of each client, all alike.
        batch_size: samples per local step.
        lr: of plain SGD.
        classes: of the task.
        tasks: the output layer has room for so many tasks of ``classes`` classes; the rounds train the first.
        permuted: pixels are permuted, as in all but the first task of permuted streams.
        variant: tells works of one name apart.
    """

    name: str
    title: str
    network: str
    options: Mapping[str, Any]
    shape: tuple[int, int, int]
    clients: int
    sampled: int
    samples: int
    batch_size: int
    lr: float
    classes: int = 10
    tasks: int = 1
    permuted: bool = False
    variant: str = field(default="")

    @property
    def outputs(self) -> int:
        """Size of the network's output layer."""
        return self.classes * self.tasks

    @property
    def client_steps(self) -> int:
        """Local steps of a round, all clients together."""
        return self.sampled * math.ceil(self.samples / self.batch_size)

    @property
    def task_size(self) -> int:
        """Training samples of the task."""
        return self.clients * self.samples

    @property
    def stored_size(self) -> int:
        """Training samples in the file: tasks after the first have one per client, as few as can be."""
        return self.task_size + (self.tasks - 1) * self.clients

    @property
    def label(self) -> str:
        """Name and variant, fit for a file name."""
        return "-".join([self.name, *self.variant.split()])

    def data_bytes(self, floats: bool) -> int:
        """Bytes of the training samples: float32 images of the task, or uint8 images of the file; int64 labels."""
        size, pixel = (self.task_size, 4) if floats else (self.stored_size, 1)
        return size * (pixel * math.prod(self.shape) + 8)

    def save(self, path: Path) -> None:
        """Write the work to a file, for another process."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what :meth:`save` wrote."""
        stored = json.loads(path.read_text())
        return cls(**{**stored, "shape": tuple(stored["shape"])})


W1 = Work(
    name="W1",
    title="permuted MNIST: MLP 784-400-400-400-10, 64 of 125 clients x 480 samples, batch 64",
    network="MLP",
    options={"hidden": [400, 400, 400], "dropout": [0.2, 0.5, 0.5]},
    shape=(1, 28, 28),
    clients=125,
    sampled=64,
    samples=480,
    batch_size=64,
    lr=0.01,
    permuted=True,
)

W2 = Work(
    name="W2",
    title="split CIFAR-100: AlexNet, 25 of 50 clients x 100 samples, batch 16",
    network="AlexNet",
    options={"dropout": [0.2, 0.2, 0.5, 0.5, 0.5]},
    shape=(3, 32, 32),
    clients=50,
    sampled=25,
    samples=100,
    batch_size=16,
    lr=0.01,
    tasks=10,
)

W3 = Work(
    name="W3",
    title="CIFAR-10 as in pfl-research: DropoutCNN, 50 of 1000 clients x 50 samples, batch 10",
    network="DropoutCNN",
    options={"dropout": [0.25, 0.5]},
    shape=(3, 32, 32),
    clients=1000,
    sampled=50,
    samples=50,
    batch_size=10,
    lr=0.1,
)

MANY = Work(
    name="W4",
    title="many clients: MLP 64-64-10, 1000 of 100,000 clients x 10 samples, batch 5",
    network="MLP",
    options={"hidden": [64], "dropout": 0.0},
    shape=(1, 8, 8),
    clients=100_000,
    sampled=1000,
    samples=10,
    batch_size=5,
    lr=0.1,
    variant="100000 clients",
)

FEW = replace(MANY, title=MANY.title.replace("100,000", "1000"), clients=1000, variant="1000 clients")

W9 = Work(
    name="W9",
    title="rotated MNIST as in Fed-A-GEM: SmallCNN, 10 of 10 clients x 640 samples, batch 32",
    network="SmallCNN",
    options={"dropout": [0.5, 0.5]},
    shape=(1, 28, 28),
    clients=10,
    sampled=10,
    samples=640,
    batch_size=32,
    lr=0.01,
)
