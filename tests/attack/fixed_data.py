"""Fixed cases of data files that are damaged, claim vast sizes, or lack something."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attack import data_files
from attack.fixed_case import TINY, Case, Wanted


def _npz(change: Callable[[dict[str, np.ndarray]], object], wanted: Wanted = "warned", *words: str) -> Case:
    """A changed ``.npz`` file of images, in a task-incremental run of two tasks."""

    def make(folder: Path) -> list[list[str]]:
        held = data_files.arrays()
        change(held)
        np.savez(folder / "pictures.npz", **held)
        return [_on_npz(folder, *words)]

    return Case(make, ("pictures", "source", "label", "class"), wanted)


def _on_npz(folder: Path, *words: str) -> list[str]:
    source = {"class_path": "Arrays", "init_args": {"path": str(folder / "pictures.npz")}}
    return [*TINY, "--data.stream", "ClassSplit", "--data.stream.num_tasks", "2", *_only(source), *words]


def _only(source: Mapping[str, Any]) -> list[str]:
    """Options that choose a source and drop all options of tiny.yaml's source."""
    return ["--data.stream.source", "Digits", f"--data.stream.source={json.dumps(source)}"]


def _relabelled(of: Mapping[int, int] | Callable[[np.ndarray], np.ndarray], *parts: str) -> Callable[[Any], None]:
    """A change of labels: of some classes, or of all together."""

    def change(held: dict[str, np.ndarray]) -> None:
        for part in parts or ("train", "test"):
            labels = held[f"{part}_labels"]
            if callable(of):
                held[f"{part}_labels"] = of(labels)
            else:
                held[f"{part}_labels"] = np.vectorize(lambda label: of.get(label, label))(labels)

    return change


def _without(part: str, label: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(held: dict[str, np.ndarray]) -> None:
        kept = held[f"{part}_labels"] != label
        for what in ("images", "labels"):
            held[f"{part}_{what}"] = held[f"{part}_{what}"][kept]

    return change


def _claiming(shape: tuple[int, ...]) -> Callable[[Path], list[list[str]]]:
    """An ``.npz`` whose array of training images claims a shape that it does not have."""

    def make(folder: Path) -> list[list[str]]:
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
        np.savez(folder / "plain.npz", **data_files.arrays())
        with zipfile.ZipFile(folder / "plain.npz") as plain, zipfile.ZipFile(folder / "pictures.npz", "w") as own:
            for name in plain.namelist():
                own.writestr(name, member if name == "train_images.npy" else plain.read(name))
        return [_on_npz(folder)]

    return make


def _bombed(folder: Path) -> list[list[str]]:
    """Write a small compressed ``.npz`` file whose training images claim 4 GB, of which it holds a sixteenth."""
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (268435456, 4, 4), }".ljust(117) + b"\n"
    np.savez(folder / "plain.npz", **data_files.arrays())
    with (
        zipfile.ZipFile(folder / "plain.npz") as plain,
        zipfile.ZipFile(folder / "pictures.npz", "w", zipfile.ZIP_DEFLATED) as own,
    ):
        for name in plain.namelist():
            if name != "train_images.npy":
                own.writestr(name, plain.read(name))
        with own.open("train_images.npy", "w", force_zip64=True) as member:
            member.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
            for _ in range(16):
                member.write(bytes(1 << 24))  # only a sixteenth, because all 4 GB would take long to write
    return [_on_npz(folder)]


def _images(change: Callable[[Path], object], wanted: Wanted = "warned") -> Case:
    """A changed folder of images."""

    def make(folder: Path) -> list[list[str]]:
        data_files.write_images(folder / "pictures")
        change(folder / "pictures")
        source = {"class_path": "ImageFolder", "init_args": {"path": str(folder / "pictures"), "shape": [1, 4, 4]}}
        return [[*TINY, "--data.stream.num_tasks", "2", *_only(source)]]

    return Case(make, ("pictures", "source"), wanted)


def _png(width: int, height: int) -> bytes:
    """A grey PNG that claims a size and holds one row."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1 + width))),
    )
    chunks = (name + data for name, data in (*parts, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


CASES: dict[str, Case] = {
    "npz a label of 10^9": _npz(_relabelled({3: 10**9}, "train"), "refused"),
    "npz labels above 2^63": _npz(_relabelled(lambda labels: labels.astype(np.uint64) + np.uint64(2**63)), "refused"),
    "npz a negative label": _npz(_relabelled({0: -1}), "refused"),
    "npz gaps between labels": _npz(_relabelled(lambda labels: labels * 10)),
    "npz labels from 1": _npz(_relabelled(lambda labels: labels + 1)),
    "npz labels that are numbers": _npz(_relabelled(lambda labels: labels + 0.5), "refused"),
    "npz labels that are texts": _npz(_relabelled(lambda labels: labels.astype(str)), "refused"),
    "npz labels that are objects": _npz(_relabelled(lambda labels: labels.astype(object)), "refused"),
    "npz labels in two dimensions": _npz(_relabelled(lambda labels: labels[:, None]), "refused"),
    "npz true and false": _npz(_relabelled(lambda labels: labels > 1)),
    "npz a class without training samples": _npz(_without("train", 2)),
    "npz a class without test samples": _npz(_without("test", 2)),
    "npz the last class without test samples": _npz(_without("test", 3)),
    "npz no training samples": _npz(
        lambda held: held.update(train_images=held["train_images"][:0], train_labels=held["train_labels"][:0]),
        "refused",
    ),
    "npz no test samples": _npz(
        lambda held: held.update(test_images=held["test_images"][:0], test_labels=held["test_labels"][:0]), "refused"
    ),
    "npz one class": _npz(_relabelled(lambda labels: labels * 0)),
    "npz images without pixels": _npz(
        lambda held: held.update(train_images=held["train_images"][:, :0], test_images=held["test_images"][:, :0]),
        "refused",
    ),
    "npz images of numbers": _npz(lambda held: held.update(train_images=held["train_images"] / 255), "refused"),
    "npz images in five dimensions": _npz(
        lambda held: held.update(train_images=held["train_images"][..., None, None]), "refused"
    ),
    "npz other test images": _npz(lambda held: held.update(test_images=held["test_images"][:, :2]), "refused"),
    "npz fewer labels": _npz(lambda held: held.update(train_labels=held["train_labels"][:-1]), "refused"),
    "npz without test images": _npz(lambda held: held.pop("test_images"), "refused"),
    "npz that claims 58 TiB": Case(_claiming((4_000_000_000_000, 4, 4)), ("pictures.npz", "source"), "refused"),
    "npz that claims a negative size": Case(_claiming((-1, 4, 4)), ("pictures.npz", "source"), "refused"),
    "npz that claims large images": Case(_claiming((48, 100_000, 100_000)), ("pictures.npz", "source"), "refused"),
    "npz that claims 10^20": Case(_claiming((10**20, 4, 4)), ("pictures.npz", "source"), "refused"),
    "npz bomb": Case(_bombed, ("pictures.npz", "source"), "refused"),
    "image of 14,000 x 14,000": _images(
        lambda folder: (folder / "train" / "a" / "0.png").write_bytes(_png(14_000, 14_000)), "refused"
    ),
    "image of 60,000 x 60,000": _images(
        lambda folder: (folder / "train" / "a" / "0.png").write_bytes(_png(60_000, 60_000)), "refused"
    ),
    "image without content": _images(lambda folder: (folder / "train" / "a" / "0.png").write_bytes(b""), "refused"),
    "image that is text": _images(lambda folder: (folder / "train" / "a" / "0.png").write_text("no image"), "refused"),
    "image that is a folder": _images(
        lambda folder: ((folder / "train/a/0.png").unlink(), (folder / "train/a/0.png").mkdir()), "either"
    ),
    "image that is a pipe": _images(
        lambda folder: ((folder / "train/a/0.png").unlink(), os.mkfifo(folder / "train/a/0.png")), "refused"
    ),
    "class without images": _images(lambda folder: (folder / "train" / "c").mkdir(), "warned"),
    "class without training images": _images(
        lambda folder: shutil.copytree(folder / "test/a", folder / "test/c"), "warned"
    ),
    "class without test images": _images(lambda folder: shutil.rmtree(folder / "test" / "a"), "warned"),
    "classes of other names in the test set": _images(
        lambda folder: (folder / "test/a").rename(folder / "test/z"), "warned"
    ),
}
"""Name -> case."""
