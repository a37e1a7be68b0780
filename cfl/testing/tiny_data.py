"""Synthetic images and small federations, for checks that take fractions of a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import Schedule
from cfl.data.sources import Binarised, Synthetic
from cfl.data.sources.boxes import DetectionSource, Record
from cfl.data.streams import ClassSplit, Permuted, Sequence, Stream
from cfl.data.types import ImageSet


def source(classes: int = 4, train: int = 80, test: int = 40) -> Synthetic:
    """A source of 4 x 4 grey images, hard enough that accuracies are neither chance nor 100 %."""
    return Synthetic(classes, [1, 4, 4], train, test, noise=60.0)


def permuted(tasks: int = 2, **of_source: int) -> Permuted:
    """A domain-incremental stream: 4 classes with permuted pixels."""
    return Permuted(source(**of_source), tasks)


def split(tasks: int = 2, **of_source: int) -> ClassSplit:
    """A task- or class-incremental stream: the classes of the source divided among the tasks."""
    return ClassSplit(source(**of_source), tasks)


def black_and_white(tasks: int = 2) -> Permuted:
    """A stream for densities: images of black and white pixels, permuted."""
    return Permuted(Binarised(source()), tasks)


class _Brightness(Synthetic):
    """Images whose labels are numbers to predict: the mean brightness of their upper and of their lower half."""

    targets = "numbers"

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """See :meth:`Synthetic.read`."""
        train, test = (part.images for part in super().read(root))
        return ImageSet(train, _halves(train)), ImageSet(test, _halves(test))


def _halves(images: Tensor) -> Tensor:
    return images.float().view(len(images), 2, -1).mean(-1) / 255


def brightness(tasks: int = 2) -> Permuted:
    """A stream for regression: two numbers per image, whose pixels are permuted."""
    return Permuted(_Brightness(2, [1, 4, 4], 80, 40, noise=60.0), tasks)


class _Squares(DetectionSource):
    """Images of 32 x 32 grey pixels with one or two bright (class 0) or dark (class 1) rectangles, drawn in memory."""

    def __init__(self) -> None:
        self.path, self.name = "squares", "squares"
        super().__init__([1, 32, 32], ["bright", "dark"], 3)

    def records(self, root: Path) -> tuple[list[Record], list[Record]]:
        """Return no records, because nothing is read from files."""
        return [], []

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """See :meth:`DetectionSource.read`."""
        return _squares(32, 0), _squares(12, 1)


def _squares(count: int, seed: int) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.full((count, 1, 32, 32), 128, dtype=torch.uint8), torch.zeros(count, 3, 5)
    labels[..., 0] = -1
    for image, boxes in zip(images, labels, strict=True):
        for box in boxes[: int(torch.randint(1, 3, (), generator=generator))]:
            width, height = torch.randint(6, 15, (2,), generator=generator).tolist()
            left, top = (int(torch.randint(0, 32 - side, (), generator=generator)) for side in (width, height))
            kind = int(torch.randint(0, 2, (), generator=generator))
            image[0, top : top + height, left : left + width] = 30 if kind else 230
            box[:] = torch.tensor([kind, left, top, left + width, top + height])
    return ImageSet(images, labels)


def squares(tasks: int = 2) -> Sequence:
    """A stream for detection: the same rectangles in every task."""
    return Sequence([_Squares() for _ in range(tasks)])


def tiny_data(
    stream: Stream | None = None, *, num_clients: int = 4, schedule: Mapping[str, Any] | None = None, **options: Any
) -> FederatedDataModule:
    """A data module, by default with two permuted tasks of three rounds, and all four clients in each round.

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


def unequal(width: int, stream: Stream | None = None, **schedule: Any) -> FederatedDataModule:
    """A data module with seven clients of 4 to 24 samples in batches of 4, with partial batches and unequal steps."""
    return tiny_data(
        stream,
        num_clients=7,
        partition=Dirichlet(alpha=0.5, min_samples=3, balance=False),
        schedule={"rounds_per_task": 2, "batch_size": 4, "cohort_width": width, **schedule},
    )
