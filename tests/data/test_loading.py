"""Every stream refuses a faulty data set class before training, and names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cfl.data.augmentation import CropFlip
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import Schedule
from cfl.data.sources import Source
from cfl.data.streams import ClassSplit, Mixture, Permuted, Rotated, Sequence, Stream
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing


class Mine(Source):
    """A source of four classes of grey images, with some attributes or samples made wrong."""

    shape, num_classes, mean, std = (1, 4, 4), 4, (0.5,), (0.5,)

    def __init__(self, load: Callable[[], Any] | None = None, **wrong: Any) -> None:
        self._load = load or (lambda: (part(), part()))
        for name, value in wrong.items():
            setattr(self, name, value)

    def load(self, root: Path) -> Any:
        return self._load()


def part(size: int = 16, shape: tuple[int, ...] = (1, 4, 4), labels: torch.Tensor | None = None) -> ImageSet:
    return ImageSet(torch.zeros(size, *shape, dtype=torch.uint8), torch.arange(size) % 4 if labels is None else labels)


def boxes(*corners: float) -> ImageSet:
    return part(1, labels=torch.tensor([[[0.0, *corners]]]))


def floats(value: float) -> ImageSet:
    return ImageSet(torch.full((4, 1, 4, 4), value), torch.arange(4))


def absent() -> Any:
    raise FileNotFoundError("nothing here")


STREAMS: dict[str, tuple[Callable[[Source], Stream], str]] = {
    "Permuted": (lambda source: Permuted(source, 2), "data.stream.source"),
    "Rotated": (lambda source: Rotated(source, 2), "data.stream.source"),
    "ClassSplit": (lambda source: ClassSplit(source, 2), "data.stream.source"),
    "Sequence": (lambda source: Sequence([source]), "data.stream.sources"),
    "Mixture": (lambda source: Mixture([source], classes_per_task=2), "data.stream.sources"),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_every_stream_refuses_it(stream: str, tmp_path: Path) -> None:
    make, key = STREAMS[stream]
    right = make(Mine())
    assert len(right.tasks(tmp_path, 0)) == (1 if stream == "Sequence" else 2)
    assert "mine" in right.name or stream == "Mixture"
    with pytest.raises(ConfigError, match=rf"^{key} = 'Mine, whose load gives NoneType' cannot work; valid: two"):
        make(Mine(lambda: None)).tasks(tmp_path, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Mine(std=(0.0,)), r"whose std is \(0\.0,\)' cannot work; valid: finite numbers above 0"),
        (Mine(mean=(0.5, 0.5)), r"with 2 numbers for mean and 1 channels' cannot work; valid: one for each"),
        (Mine(lambda: (part(), None)), r"whose load gives \['ImageSet', 'NoneType'\]"),
        (
            Mine(lambda: (part(shape=(4, 4)), part())),
            r"which cannot be loaded \(TypeError: images must be uint8 or float32 \[",
        ),
        (Mine(lambda: (part(), part(shape=(1, 5, 4)))), r"whose test images have the shape \[1, 5, 4\]' .*\[1, 4, 4\]"),
        (Mine(mean=0.5), r"whose mean is 0\.5' cannot work; valid: a number per channel"),
        (
            Mine(lambda: (part(shape=(1, 4, 4)), part().nothing)),
            r"which cannot be loaded \(AttributeError: 'ImageSet' object has no",
        ),
        (Mine(lambda: (floats(0.5), floats(math.nan))), r"whose test images hold NaN or infinity' cannot work"),
        (
            Mine(lambda: (floats(0.5), floats(0.25))),
            r"whose images are float32 and is_float is False' cannot work; valid: is_float True for float32, False for",
        ),
        (
            Mine(is_float=True),
            r"whose images are uint8 and is_float is True' cannot work; valid: is_float True for float32, False for",
        ),
        (Mine(lambda: {}["train"]), r"which cannot be loaded \(KeyError: 'train' \(test_loading\.py, line \d+\)\)"),
        (
            Mine(lambda: (part(), floats(0.5))),
            r"whose training images are uint8 \[16, 1, 4, 4\] and test images float32 .* valid: one type for both",
        ),
        (Mine(shape=(4, 4)), r"whose shape is \(4, 4\)' cannot work; valid: \(C, H, W\), three integers"),
        (Mine(num_classes="4"), r"whose num_classes is '4'\" cannot work; valid: an integer of at least 1"),
        (Mine(targets="clases"), r"whose targets are 'clases'\" cannot work; valid: classes or numbers or boxes"),
        (Mine(mean=(None,)), r"whose mean is \(None,\)' cannot work; valid: a number per channel"),
        (Mine(scale="255"), r"whose scale is '255'\" cannot work; valid: the positive value that means 1"),
        (Mine(class_names=("a", "b")), r"with 2 class_names and 4 classes' cannot work; valid: one for each, or none"),
        (Mine(transform=lambda: None), r"whose transform is NoneType' cannot work; valid: a cfl\.data\.types\.Pixel"),
        (Mine(transform=lambda: 1 / 0), r"whose transform fails \(ZeroDivisionError: .*line \d+\)\)' cannot work"),
        (
            Mine(lambda: (replace(part(), clients=torch.arange(-1, 15)), part())),
            r"whose training samples have the client -1' cannot work; valid: integers from 0",
        ),
        (
            Mine(lambda: (replace(part(), seconds=torch.full((16,), math.nan).double()), part())),
            r"of whose training samples some last NaN or negative seconds' .* valid: finite numbers from 0",
        ),
        (Mine(num_classes=3), r"whose training labels run from 0 to 3' cannot work; valid: 0 to 2, the announced 3"),
        (Mine(targets="numbers"), r"whose training labels are int64 \[16\]' cannot work; valid: the announced numbers"),
        (
            Mine(lambda: (part(labels=torch.zeros(16, 2)),) * 2, targets="numbers", num_classes=3),
            r"whose training labels are \[16, 2\], or not finite' cannot work; valid: 3 finite numbers each",
        ),
        (
            Mine(lambda: (boxes(0, 0, 2, 2), boxes(0, 0, 5, 2)), targets="boxes"),
            r"whose test boxes are not within its images' .* valid: left, top, right and bottom within 4 x 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(wrong: Mine, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.stream\.sources = [\"']Mine, {said}"):
        Sequence([wrong]).tasks(tmp_path, 0)


def test_files_that_a_class_does_not_find_are_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DataFilesMissing, match=r"^Mine: nothing here$"):
        Permuted(Mine(absent)).tasks(tmp_path, 0)


def test_numbers_and_names_may_be_numpys(tmp_path: Path) -> None:
    source = Mine(num_classes=np.int64(4), shape=(np.int64(1), 4, 4), class_names=np.array(["a", "b", "c", "d"]))
    for stream in (Permuted(source, 2), Sequence([source])):
        data = FederatedDataModule(stream, Schedule(), num_clients=2, root=str(tmp_path))
        assert len(data.tasks) == stream.num_tasks
        assert [name[-1] for name in stream.class_names(tmp_path, 0)[0]] == ["a", "b", "c", "d"]
        assert [type(size) for size in (*stream.shape, *stream.classes_per_task)] == [int] * (3 + stream.num_tasks)


def test_rows_are_rows_though_their_shape_is_a_list() -> None:
    with pytest.raises(ConfigError, match=r"rows of numbers"):
        Rotated(Mine(shape=[1, 1, 16]), 2)
    with pytest.raises(ConfigError, match=r"data\.augmentation = .* rows of numbers"):
        FederatedDataModule(Permuted(Mine(shape=[1, 1, 16]), 2), Schedule(), augmentation=CropFlip(1))


def test_sizes_that_cannot_be_set_have_their_types() -> None:
    fixed = type("Fixed", (Mine,), {"shape": property(lambda _: [1, 4, 4])})
    with pytest.raises(
        ConfigError, match=r"shape is \[1, 4, 4\], which cannot be set' cannot work; valid: \(1, 4, 4\)"
    ):
        Permuted(fixed(), 2)
    fixed.shape = property(lambda _: (1, 4, 4))
    assert Permuted(fixed(), 2).shape == (1, 4, 4)


def test_what_a_class_does_not_announce_is_said() -> None:
    kind = type("Nameless", (Source,), {"load": Mine.load, "shape": (1, 4, 4), "num_classes": 4, "std": (0.5,)})
    with pytest.raises(ConfigError, match=r"^data\.stream\.source = 'Nameless, without mean' cannot work"):
        Permuted(kind())
