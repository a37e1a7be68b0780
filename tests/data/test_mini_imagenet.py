"""mini-ImageNet: pixels and labels of each layout, and the messages about absent and unsuitable files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cfl.data.sources import MiniImageNet
from cfl.data.streams import ClassSplit
from cfl.runtime.errors import DataFilesMissing

CLASSES = 100


def content(train: int = 2, test: int = 1) -> dict[str, np.ndarray]:
    """``train`` and ``test`` random images of each class, in random order of classes."""
    rng = np.random.default_rng(0)
    found = {}
    for part, count in (("train", train), ("test", test)):
        found[f"{part}_x"] = rng.integers(0, 256, (CLASSES * count, 84, 84, 3), dtype=np.uint8)
        found[f"{part}_y"] = rng.permutation(np.arange(CLASSES * count) % CLASSES)
    return found


def write_arrays(root: Path, **replaced: Any) -> dict[str, np.ndarray]:
    """Write mammoth's four files, some replaced. Returns the arrays without replacements."""
    whole = content()
    (root / "MINIIMG").mkdir(parents=True)
    for name, values in {**whole, **replaced}.items():
        np.save(root / "MINIIMG" / f"{name}.npy", values)
    return whole


def write_folder(folder: Path, per_class: int, first: int = 0) -> None:
    """Write class folders ``n000`` .. ``n099``. Image i of class k has the colour (k, first + i, 200) everywhere."""
    from PIL import Image

    for k in range(CLASSES):
        (folder / f"n{k:03d}").mkdir(parents=True)
        for i in range(per_class):
            image = np.empty((84, 84, 3), dtype=np.uint8)
            image[:] = (k, first + i, 200)
            Image.fromarray(image).save(folder / f"n{k:03d}" / f"{i}.png")


@pytest.mark.parametrize("stored", ["bytes", "float32", "float64"])
def test_arrays_give_the_stored_bytes(tmp_path: Path, stored: str, caplog: pytest.LogCaptureFixture) -> None:
    """All 256 values are restored, even from floats one rounding error too low, where ``uint8(255 * x)`` would not."""
    replaced = {}
    if stored != "bytes":
        for name in ("train_x", "test_x"):
            replaced[name] = np.nextafter(content()[name].astype(stored) / np.array(255, stored), np.array(0, stored))
        assert ((replaced["train_x"] * 255).astype(np.uint8) != content()["train_x"]).any()
    whole = write_arrays(tmp_path, **replaced)
    with caplog.at_level(logging.WARNING):
        train, test = MiniImageNet().load(tmp_path)
    assert len(np.unique(whole["train_x"])) == 256
    for part, images in (("train", train), ("test", test)):
        assert images.images.dtype == torch.uint8
        np.testing.assert_array_equal(images.images.numpy(), whole[f"{part}_x"].transpose(0, 3, 1, 2))
        assert images.labels.tolist() == whole[f"{part}_y"].tolist()
        assert images.images.is_contiguous()
    assert "has 200 training and 100 test samples; the published set has 50000 and 10000" in caplog.text


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("train_x", np.zeros((200, 84, 84, 3), np.float16), r"train_x\.npy holds float16"),
        ("train_x", np.zeros((200, 84, 84, 3), np.int64), r"train_x\.npy holds int64"),
        ("test_x", np.full((100, 84, 84, 3), 0.501, np.float32), r"test_x\.npy .*no multiples of 1/255"),
        ("test_x", np.full((100, 84, 84, 3), 2.0, np.float32), r"test_x\.npy .*no multiples of 1/255"),
        ("test_x", np.full((100, 84, 84, 3), np.nan), r"test_x\.npy .*no multiples of 1/255"),
        ("train_x", np.zeros((200, 84, 84), np.uint8), r"\[200, 84, 84\].*expected images \[N, 84, 84, 3\]"),
        ("train_x", np.zeros((200, 3, 84, 84), np.uint8), r"shape \[84, 3, 84\], not \[3, 84, 84\]"),
        ("train_y", np.zeros(199, np.int64), r"train_y\.npy int64 \[199\]"),
        ("train_y", np.zeros(200), r"integer labels \[N\]"),
        ("train_y", np.arange(200), r"training labels run from 0 to 199"),
        ("test_y", np.arange(100) // 2, r"50 of 100 classes have no test sample.*few-shot"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path: Path, name: str, values: np.ndarray, reason: str) -> None:
    write_arrays(tmp_path, **{name: values})
    with pytest.raises(DataFilesMissing, match=reason):
        MiniImageNet().load(tmp_path)


@pytest.mark.parametrize("keep", [0, 50, 5000])
def test_cut_off_file_is_named(tmp_path: Path, keep: int) -> None:
    write_arrays(tmp_path)
    file = tmp_path / "MINIIMG" / "test_x.npy"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataFilesMissing, match=r"test_x\.npy is damaged"):
        MiniImageNet().load(tmp_path)


def test_class_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "mini-imagenet" / "train", 2)
    write_folder(tmp_path / "mini-imagenet" / "test", 1, first=7)
    train, test = MiniImageNet().load(tmp_path)
    assert train.images.shape == (200, 3, 84, 84)
    assert train.labels.tolist() == [k for k in range(CLASSES) for _ in range(2)]
    assert train.images[:, :, 3, 80].tolist() == [[k, i, 200] for k in range(CLASSES) for i in range(2)]
    assert test.images[:, :, 83, 0].tolist() == [[k, 7, 200] for k in range(CLASSES)]


def test_class_folders_not_divided_yet(tmp_path: Path) -> None:
    write_folder(tmp_path / "mini-imagenet" / "images", 6)
    train, test = MiniImageNet().load(tmp_path)
    assert torch.bincount(train.labels).tolist() == [5] * CLASSES
    assert torch.bincount(test.labels).tolist() == [1] * CLASSES
    both = torch.cat([train.images, test.images])[:, :2, 0, 0].tolist()
    assert sorted(both) == [[k, i] for k in range(CLASSES) for i in range(6)]
    assert torch.equal(test.images[:, 0, 0, 0].long(), test.labels)
    again = MiniImageNet().load(tmp_path)
    assert torch.equal(again[1].images, test.images)


def test_few_shot_splits_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "all", 1)
    for part, classes in (("train", range(64)), ("test", range(80, 100))):
        folder = tmp_path / "mini-imagenet" / part
        folder.mkdir(parents=True)
        for k in classes:
            (tmp_path / "all" / f"n{k:03d}").rename(folder / f"n{k:03d}")
    with pytest.raises(DataFilesMissing, match="train and test must have the same classes"):
        MiniImageNet().load(tmp_path)


def test_absent_files_name_every_layout(tmp_path: Path) -> None:
    (tmp_path / "MINIIMG").mkdir()
    np.save(tmp_path / "MINIIMG" / "train_y.npy", np.zeros(3))
    with pytest.raises(DataFilesMissing) as caught:
        MiniImageNet().load(tmp_path)
    text = str(caught.value)
    for part in ("train", "test"):
        assert f"{tmp_path}/MINIIMG/{part}_x.npy (missing)" in text
        assert f"{tmp_path}/mini-imagenet/{part}" in text
    assert "train_y.npy (present)" in text
    assert f"{tmp_path}/mini-imagenet/images" in text
    assert "miniImagenet.zip" in text
    assert "CFL_DATA_ROOT" in text


def test_twenty_tasks_of_five_classes_in_stored_order(tmp_path: Path) -> None:
    """Task j has the classes 5j .. 5j + 4, as in FOT, and its network inputs are standardised."""
    whole = write_arrays(tmp_path)
    tasks = ClassSplit(MiniImageNet(), 20).tasks(tmp_path, seed=3)
    assert [task.num_classes for task in tasks] == [5] * 20
    for j, task in enumerate(tasks):
        own = np.flatnonzero(whole["train_y"] // 5 == j)
        assert task.train.labels.tolist() == (whole["train_y"][own] % 5).tolist()
        mean = np.array([0.4731, 0.4491, 0.4038])
        std = np.array([0.2729, 0.2656, 0.2795])
        expected = ((whole["train_x"][own] / 255 - mean) / std).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(task.transform(task.train.images).numpy(), expected, rtol=0, atol=2e-3)
