"""``FromDataset``, the source that reads torch data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import tiny_cli
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from cfl.data.sources import FromDataset, Synthetic
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.testing import check_source

PLAIN = Synthetic(4, [3, 4, 4], 40, 20)


class Pairs(Dataset):  # type: ignore[type-arg]
    """The synthetic images as pictures, arrays or tensors."""

    classes = ("ant", "bee", "cat", "dog")

    def __init__(
        self, train: bool = True, form: str = "picture", transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.held = PLAIN.load(Path())[not train]
        self.form, self.transform = form, transform

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.held.images[index], int(self.held.labels[index])
        pixels = image.permute(1, 2, 0).numpy()
        forms: dict[str, Any] = {
            "picture": lambda: Image.fromarray(pixels),
            "array": lambda: pixels,
            "tensor": lambda: image,
            "float": lambda: image.double() / 255,
        }
        found = forms[self.form]()
        return found if self.transform is None else self.transform(found), np.int32(label)


@pytest.mark.parametrize("form", ["picture", "array", "tensor"])
def test_images_and_labels_are_the_data_sets(form: str) -> None:
    source = FromDataset(Pairs(True, form), Pairs(False, form))
    assert (source.shape, source.num_classes, source.scale, source.name) == ((3, 4, 4), 4, 255.0, "pairs")
    assert source.names(Path()) == Pairs.classes
    for found, expected in zip(source.load(Path()), PLAIN.load(Path()), strict=True):
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.labels, expected.labels)
    check_source(source)


@pytest.mark.parametrize("form", ["array", "tensor", "float"])
def test_arrays_have_the_channels_first_or_last(form: str) -> None:
    source = FromDataset(Pairs(True, form), Pairs(False, form))
    images = source.load(Path())[0].images
    for stored in (images, images.permute(0, 2, 3, 1)):
        assert torch.equal(source.images_of_array(stored.numpy(), Path()), images)


def test_floating_point_images_are_network_input_where_nothing_else_is_said() -> None:
    source = FromDataset(Pairs(True, "float"), Pairs(False, "float"), max_train=8)
    train, _ = source.load(Path())
    expected = FromDataset(Pairs(True), Pairs(False), max_train=8)
    inputs = expected.transform()(expected.load(Path())[0].images)
    torch.testing.assert_close(source.transform()(train.images), inputs, rtol=0, atol=1e-6)


def test_vectors_and_unnamed_classes() -> None:
    train, test = (TensorDataset(torch.randn(n, 5), torch.arange(n) % 3) for n in (12, 6))
    source = FromDataset(train, test)
    assert (source.shape, source.num_classes, source.names(Path())) == ((1, 1, 5), 3, ("0", "1", "2"))
    assert torch.equal(source.load(Path())[0].images.flatten(1), train.tensors[0])


def test_numbers_that_float32_cannot_tell_apart_are_refused() -> None:
    """Seconds since 1970 that differ by a few are all the same in float32, whose steps there are 128."""
    images, labels = torch.zeros(4, 3), torch.tensor([1.7e9, 1.7e9 + 3, 1.7e9 + 5, 1.7e9 + 9], dtype=torch.float64)
    assert FromDataset(*[TensorDataset(images, labels - 1.7e9)] * 2, numbers=True).load(Path())[0].labels.tolist() == [
        [0.0],
        [3.0],
        [5.0],
        [9.0],
    ]
    with pytest.raises(DataFilesMissing, match="labels of train differ too little for their size to be float32"):
        FromDataset(*[TensorDataset(images, labels)] * 2, numbers=True).load(Path())


def test_files_go_through_the_data_sets_transform(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    picture.save(tmp_path / "x.png")

    def halved(image: Image.Image) -> Image.Image:
        return image.resize((4, 4))

    source = FromDataset(Pairs(transform=halved), Pairs(False, transform=halved))
    found = source.image_of_file(tmp_path / "x.png", tmp_path)
    assert torch.equal(found, torch.from_numpy(np.array(halved(picture))).permute(2, 0, 1))
    with pytest.raises(DataFilesMissing, match=r"x\.png has 8 x 8 pixels, not 4 x 4"):
        FromDataset(Pairs(), Pairs(False)).image_of_file(tmp_path / "x.png", tmp_path)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """An iterable data set, which has no samples by index."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Broken(Pairs):
    """A data set whose third sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index == 2:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Noisy(Pairs):
    """A data set that gives another image at each read."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.randint(0, 256, (3, 4, 4), dtype=torch.uint8), 0


class Unequal(Pairs):
    """A data set with one image of another size."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        return (image if index != 5 else image.resize((5, 4))), label


class Named(Pairs):
    """A data set whose labels are texts."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return super().__getitem__(index)[0], "ant"


class ChannelsFirst(Pairs):
    """A data set of arrays that have the channels where tensors have them."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.held.images[index].numpy(), 0


class Keyed(Pairs):
    """A data set whose samples are mappings."""

    def __getitem__(self, index: int) -> Any:
        return {"image": super().__getitem__(index)[0]}


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (Stream, ConfigError, r"data\.stream\.source\.train = 'Stream' .*a map-style Dataset"),
        (Broken, DataFilesMissing, r"Broken\[2\] cannot be used: the disk is gone"),
        (Noisy, ConfigError, r"Noisy, whose sample 0 is another one when it is read again.*without random transforms"),
        (Unequal, DataFilesMissing, r"train\[5\] is torch\.uint8 \[3, 4, 5\], the first training image"),
        (ChannelsFirst, DataFilesMissing, r"ChannelsFirst\[0\] .*its image is an array \[3, 4, 4\], not \[H, W, C\]"),
        (Keyed, DataFilesMissing, r"Keyed\[0\] cannot be used: it is a dict, not a pair \(image, label\)"),
        (Named, DataFilesMissing, r"Named\[0\] cannot be used: its label is 'ant', not an integer from 0"),
    ],
)
def test_data_sets_that_cannot_be_used_are_named(kind: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        FromDataset(kind(), Pairs(False), num_classes=4).load(Path())


def test_a_data_set_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a data set's constructor is reported with the option's name."""
    absent = {"class_path": "torchvision.datasets.MNIST", "init_args": {"root": str(tmp_path)}}
    source = {"class_path": "FromDataset", "init_args": {"train": absent, "test": absent}}
    stream = {"class_path": "ClassSplit", "init_args": {"source": source, "num_tasks": 2}}
    assert tiny_cli.fit(tmp_path / "run", "--data.stream.source", "Digits", "--data.stream", json.dumps(stream)) == 2
    assert "error: data.stream.source.train cannot be used: Dataset not found." in capsys.readouterr().err


def test_a_configuration_names_classes_with_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration may name data set classes. A checkpoint may do so only if ``--allow`` names their package."""
    sets = {
        part: {"class_path": f"{__name__}.Pairs", "init_args": {"train": part == "train"}} for part in ("train", "test")
    }
    source = {"class_path": "FromDataset", "init_args": sets}
    stream = {"class_path": "ClassSplit", "init_args": {"source": source, "num_tasks": 2}}
    config = tmp_path / "own.yaml"
    config.write_text(str({"data": {"stream": stream, "partition": "IID"}}))
    assert tiny_cli.fit(tmp_path / "run", "--config", str(config)) == 0
    assert tiny_cli.summary(tmp_path / "run")["benchmark"] == "classsplit-pairs"
    last = ("--ckpt_path", str(tmp_path / "run" / "last.ckpt"))
    capsys.readouterr()
    assert tiny_cli.run("validate", *last) == 2
    assert "Pairs" in (said := capsys.readouterr().err)
    assert "--allow PACKAGE" in said
    assert tiny_cli.run("validate", *last, "--allow", __name__) == 0
