"""Tiny-ImageNet: pixels and labels of both layouts, and the messages about absent and unsuitable files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cfl.data.sources import TinyImageNet
from cfl.data.streams import ClassSplit
from cfl.runtime.errors import DataFilesMissing

CLASSES = 200
# Not in alphabetical order, so that numbering by wnids.txt and by name differ.
IDENTIFIERS = [f"n{(7 * k) % CLASSES:03d}" for k in range(CLASSES)]


def write_arrays(root: Path, as_floats: bool = False, **replaced: Any) -> dict[str, np.ndarray]:
    """Write mammoth's 80 files, some replaced. Returns the joined arrays, not replaced: ``train_x`` and so on."""
    folder = root / "TINYIMG" / "processed"
    folder.mkdir(parents=True)
    rng, whole = np.random.default_rng(0), {}
    for part, count in (("train", 20), ("val", 10)):
        labels = rng.permutation(np.arange(20 * count) % CLASSES).reshape(20, count)
        images = rng.integers(0, 256, (20, count, 64, 64, 3), dtype=np.uint8)
        for i in range(20):
            stored = images[i] / 255 if as_floats else images[i]
            np.save(folder / f"x_{part}_{i + 1:02d}.npy", replaced.get(f"x_{part}_{i + 1:02d}", stored))
            np.save(folder / f"y_{part}_{i + 1:02d}.npy", replaced.get(f"y_{part}_{i + 1:02d}", labels[i]))
        whole |= {f"{part}_x": images.reshape(-1, 64, 64, 3), f"{part}_y": labels.reshape(-1)}
    return whole


def write_folder(root: Path, side: int = 64) -> Path:
    """Write the published archive's folders. Training image i of class k is (k, 16 i, 200); test images are grey."""
    from PIL import Image

    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(IDENTIFIERS) + "\n")
    (folder / "words.txt").write_text("n000\ta word\n")
    lines = []
    for k, identifier in enumerate(IDENTIFIERS):
        images = folder / "train" / identifier / "images"
        images.mkdir(parents=True)
        for i in (0, 2, 10):
            Image.new("RGB", (side, side), (k, 16 * i, 200)).save(
                images / f"{identifier}_{i}.JPEG", quality=100, subsampling=0
            )
        grey = Image.new("L", (side, side), k)
        grey.save(folder / "val" / "images" / f"val_{k}.JPEG", quality=100)
        lines.append(f"val_{k}.JPEG\t{identifier}\t0\t32\t44\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines[::-1]) + "\n")
    return folder


@pytest.mark.parametrize("as_floats", [False, True], ids=["bytes", "floats"])
def test_arrays_give_the_stored_bytes(tmp_path: Path, as_floats: bool, caplog: pytest.LogCaptureFixture) -> None:
    whole = write_arrays(tmp_path, as_floats)
    with caplog.at_level(logging.WARNING):
        train, test = TinyImageNet().load(tmp_path)
    for part, images in (("train", train), ("val", test)):
        assert images.images.dtype == torch.uint8
        np.testing.assert_array_equal(images.images.numpy(), whole[f"{part}_x"].transpose(0, 3, 1, 2))
        assert images.labels.tolist() == whole[f"{part}_y"].tolist()
    assert "has 400 training and 200 test samples; the published set has 100000 and 10000" in caplog.text


def test_image_files_are_numbered_by_the_list_of_classes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    train, test = TinyImageNet().load(tmp_path)
    assert train.labels.tolist() == [k for k in range(CLASSES) for _ in range(3)]
    assert test.labels.tolist() == list(range(CLASSES))[::-1]
    middle = train.images[:, :, 30, 30].int()
    expected = torch.tensor([[k, 16 * i, 200] for k in range(CLASSES) for i in (0, 2, 10)])
    assert int((middle - expected).abs().max()) <= 2  # JPEG
    grey = test.images[:, :, 30, 30].int()
    assert int((grey - torch.arange(CLASSES).flip(0)[:, None]).abs().max()) <= 2
    again, _ = TinyImageNet(max_train=200).load(tmp_path)
    assert torch.bincount(again.labels).tolist() == [1] * CLASSES


def test_arrays_are_preferred_where_they_are_complete(tmp_path: Path) -> None:
    write_folder(tmp_path)
    whole = write_arrays(tmp_path)
    assert len(TinyImageNet().load(tmp_path)[0]) == len(whole["train_y"])
    (tmp_path / "TINYIMG" / "processed" / "y_val_20.npy").unlink()
    assert len(TinyImageNet().load(tmp_path)[0]) == 3 * CLASSES


def test_nothing_there_names_both_layouts(tmp_path: Path) -> None:
    with pytest.raises(DataFilesMissing) as caught:
        TinyImageNet().load(tmp_path)
    message = str(caught.value)
    for part in ("tiny-imagenet-200.zip", "wnids.txt (missing)", "val_annotations.txt (missing)", "80 of 80 missing"):
        assert part in message
    assert "tiny-imagenet-processed.zip" in message
    assert "CFL_DATA_ROOT" in message


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("x_train_03", np.zeros((20, 64, 64, 3), np.float16), r"x_train_03\.npy holds float16"),
        ("x_val_20", np.full((10, 64, 64, 3), 1.5), r"x_val_20\.npy .*no multiples of 1/255"),
        ("x_train_01", np.zeros((20, 32, 32, 3), np.uint8), r"\[3, 32, 32\] and \[3, 64, 64\], not \[3, 64, 64\]"),
        ("y_train_05", np.zeros(19, np.int64), r"\[19\]: expected images \[N, 64, 64, 3\]"),
        ("y_val_05", np.zeros(10, np.int64), r"of 200 classes have no test sample"),
        ("y_val_05", np.full(10, 200), r"test labels run"),
    ],
)
def test_arrays_of_another_kind(tmp_path: Path, name: str, values: np.ndarray, reason: str) -> None:
    write_arrays(tmp_path, **{name: values})
    with pytest.raises(DataFilesMissing, match=reason):
        TinyImageNet().load(tmp_path)


def test_image_files_of_another_kind(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "val" / "images" / "val_3.JPEG").write_bytes(b"no image")
    with pytest.raises(DataFilesMissing, match=r"val_3\.JPEG cannot be read as an image"):
        TinyImageNet().load(tmp_path)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn999\t0\t0\t1\t1\n")
    with pytest.raises(DataFilesMissing, match=r"val_annotations\.txt: the line 'val_0"):
        TinyImageNet().load(tmp_path)
    (folder / "wnids.txt").write_text("n000\nn001\n")
    with pytest.raises(DataFilesMissing, match=r"wnids\.txt names 2 classes, not 200"):
        TinyImageNet().load(tmp_path)


def test_images_of_another_size(tmp_path: Path) -> None:
    write_folder(tmp_path, side=32)
    with pytest.raises(DataFilesMissing, match="32 x 32 pixels, not 64 x 64"):
        TinyImageNet().load(tmp_path)


def test_ten_tasks_of_twenty_classes(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    tasks = ClassSplit(TinyImageNet(), 10).tasks(tmp_path, seed=0)
    assert [task.num_classes for task in tasks] == [20] * 10
    assert tasks[3].name == "tiny-imagenet classes 60-79"
