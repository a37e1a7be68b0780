"""Data sets that are wrong on purpose are caught; made-up ones of the package pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cfl.data.sources import Binarised, Digits, Source, Synthetic
from cfl.data.types import ImageSet
from cfl.testing import check_source


class Noise(Source):
    """Two channels of noise, three classes."""

    name, shape, num_classes, mean, std = "noise", (2, 3, 4), 3, (0.5, 0.5), (0.2, 0.2)

    def __init__(self, **wrong: Any) -> None:
        self.given = wrong
        self.loads = 0
        for name in ("shape", "num_classes", "mean", "std", "scale", "targets", "transform"):
            if name in wrong:
                setattr(self, name, wrong[name])

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        self.loads += 1
        generator = torch.Generator().manual_seed(self.loads if self.given.get("changes") else 0)

        def part(size: int) -> ImageSet:
            images = torch.randint(0, 256, (size, 2, 3, 4), dtype=torch.uint8, generator=generator)
            return ImageSet(images, torch.arange(size) % 3 + self.given.get("first", 0))

        train, test = part(12), part(self.given.get("test", 6))
        if self.given.get("same"):
            return train, train
        if self.given.get("overlap") is not None:  # test images begin so many images before the end of training images
            images, begin = torch.cat([train.images, test.images]).numpy(), 12 - self.given["overlap"]
            both = torch.from_numpy(images[:12]), torch.from_numpy(images[begin : begin + 6])
            return ImageSet(both[0], train.labels), ImageSet(both[1], test.labels)
        if self.given.get("interleaved"):
            images = torch.cat([train.images, test.images[:6]])
            return ImageSet(images[::2], torch.arange(9) % 3), ImageSet(images[1::2], torch.arange(9) % 3)
        if self.given.get("copied"):
            return train, train.subset(torch.arange(5))
        return (train, self.given["instead"]) if "instead" in self.given else (train, test)


def test_right_ones_pass(tmp_path: Path) -> None:
    of_one_array = Noise(overlap=0), Noise(interleaved=True)
    for source in (Noise(), *of_one_array, Synthetic(3), Binarised(Synthetic(3)), Digits()):
        check_source(source, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mean": (0.5,)}, r"^transform: Noise, with 1 numbers for mean and 2 channels; valid: one for each"),
        ({"std": (0.5, 0.0)}, r"^transform: Noise, whose std is \(0\.5, 0\.0\); valid: finite numbers above 0"),
        ({"mean": (0.5, float("nan"))}, r"^transform: Noise, whose mean is .*nan.*; valid: finite numbers$"),
        ({"scale": 0.0}, r"^transform: Noise, whose scale is 0\.0; valid: the positive value that means 1"),
        (
            {"shape": (2, 4, 3)},
            r"^images: Noise, whose training images have the shape \[2, 3, 4\]; valid: .* \[2, 4, 3\]",
        ),
        ({"instead": 5 / 7}, r"^images: Noise, whose load gives \['ImageSet', 'float'\]; valid: two"),
        ({"targets": "clases"}, r"^labels: Noise, whose targets are 'clases'; valid: classes or numbers or boxes"),
        ({"num_classes": "3"}, r"^labels: Noise, whose num_classes is '3'; valid: an integer of at least 1"),
        ({"first": 0.5}, r"^images: Noise, which cannot be loaded \(TypeError: labels must be int64 \[N=12\]"),
        ({"transform": partial(int)}, r"^transform: Noise, whose transform is int; valid: a cfl\.data\.types"),
        ({"test": 0}, r"^images: the test set of Noise is empty"),
        ({"instead": None}, r"^images: Noise, whose load gives \['ImageSet', 'NoneType'\]; valid: two"),
        ({"num_classes": 2}, r"^labels: Noise, whose training labels run from 0 to 2; valid: 0 to 1, the"),
        ({"first": -1}, r"^labels: Noise, whose training labels run from -1 to 1; valid: 0 to 2, the"),
        ({"changes": True}, r"^again: Noise gives other training samples when it is loaded once more"),
        ({"same": True}, r"^apart: training and test set of Noise are the same memory"),
        ({"overlap": 1}, r"^apart: training and test set of Noise are the same memory"),
        ({"copied": True}, r"^apart: every test image of Noise is a training image as well"),
    ],
    ids=str,
)
def test_wrong_ones_are_caught(wrong: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_source(Noise(**wrong), tmp_path)
