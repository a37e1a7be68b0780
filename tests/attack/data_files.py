"""Tiny files of the formats that sources read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

NPZ, IMAGES, MNIST = "data.npz", "images", "MNIST"


def arrays(seed: int = 0, classes: int = 4, train: int = 48, test: int = 20) -> dict[str, np.ndarray]:
    """Arrays of an ``.npz`` file for :class:`cfl.data.sources.Arrays`: images of 4 x 4, all classes equally often."""
    draw = np.random.default_rng(seed)
    return {
        "train_images": draw.integers(0, 256, (train, 4, 4), dtype=np.uint8),
        "train_labels": np.arange(train) % classes,
        "test_images": draw.integers(0, 256, (test, 4, 4), dtype=np.uint8),
        "test_labels": np.arange(test) % classes,
    }


def write_images(folder: Path) -> None:
    """Write images of 4 x 4 as ``train/<class>/<n>.png`` and ``test/<class>/<n>.png``."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        for of in "ab":
            (folder / part / of).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(draw.integers(0, 256, (4, 4), dtype=np.uint8))
                image.save(folder / part / of / f"{number}.png")


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the idx format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes())


def write_mnist(raw: Path) -> None:
    """Write MNIST's four files, unpacked, for 30 training and 30 test images."""
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", draw.integers(0, 256, (30, 28, 28), dtype=np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(30, dtype=np.uint8) % 10)


def link(folder: Path) -> None:
    """Link the files as ``data`` of a folder, where its commands look for data by default; make them beside it."""
    made = folder.parent / "data-files"
    if not made.exists():
        made.mkdir()
        np.savez(made / NPZ, **arrays())
        write_images(made / IMAGES)
        write_mnist(made / MNIST / "raw")
    (folder / "data").symlink_to(made.resolve())
