"""Tiny-ImageNet, as the image files that were published or as mammoth's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.images import class_names, read_image
from cfl.data.sources.npy_images import read_npy_images
from cfl.data.sources.split import joined
from cfl.data.sources.standard import StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing

_IMAGES_ADDRESS = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_ARRAYS_ADDRESS = "https://unimore365-my.sharepoint.com/:u:/g/personal/263133_unimore_it/EVKugslStrtNpyLGbgrhjaABqRHcE3PB_r2OEaV7Jy94oQ?e=9K29aD"
_PIECES = 20
_SIDE = 64


class TinyImageNet(StandardSource):
    """200 classes of ImageNet photographs, 500 + 50 of each, 64x64 in colour (Stanford CS231n).

    The published test set has no labels: the test set here is the published validation set. The first of these layouts
    that is found is used. Both number the classes in the order of ``wnids.txt``, as mammoth does.

    1. ``<root>/TINYIMG/processed/{x,y}_{train,val}_{01..20}.npy``: images ``[n, 64, 64, 3]`` as unsigned bytes, or as
       floats that are bytes / 255, and integer labels ``[n]``; mammoth's files (aimagelab, data set ``seq-tinyimg``).
    2. ``<root>/tiny-imagenet-200/``: ``wnids.txt``, ``train/<wnid>/images/*.JPEG``, ``val/images/*.JPEG`` with
       ``val/val_annotations.txt``, as in the published archive.

    Nothing is downloaded. Default normalisation: mammoth's, that of the training pixels: 0.4802, 0.4480, 0.3975
    and 0.2770, 0.2691, 0.2821.
    """

    name = "tiny-imagenet"
    title = "TinyImageNet"
    shape = (3, _SIDE, _SIDE)
    num_classes = 200
    mean = (0.4802, 0.4480, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    published = (100_000, 10_000)
    tests_may_lack_classes = False

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, from the first layout found."""
        arrays, folder = root / "TINYIMG" / "processed", root / "tiny-imagenet-200"
        names = {
            part: [
                (arrays / f"x_{part}_{number:02d}.npy", arrays / f"y_{part}_{number:02d}.npy")
                for number in range(1, _PIECES + 1)
            ]
            for part in ("train", "val")
        }
        absent = [file for pairs in names.values() for pair in pairs for file in pair if not file.is_file()]
        if not absent:
            return self._joined(names["train"]), self._joined(names["val"])
        needed = [folder / "wnids.txt", folder / "train", folder / "val" / "images"]
        needed.append(folder / "val" / "val_annotations.txt")
        if all(path.exists() for path in needed):
            return _read_folder(folder, self.num_classes)
        states = "\n".join(f"  {path} ({'present' if path.exists() else 'missing'})" for path in needed)
        raise DataFilesMissing(
            f"{self.title}: files are missing. Expected either\n{states}\n"
            f"from the archive {_IMAGES_ADDRESS}\nor\n"
            f"  {arrays}/{{x,y}}_{{train,val}}_{{01..{_PIECES}}}.npy ({len(absent)} of {4 * _PIECES} missing)\n"
            f"from mammoth's archive tiny-imagenet-processed.zip, to be fetched with a browser: {_ARRAYS_ADDRESS}\n"
            f"{WHERE_ELSE}"
        )

    def _joined(self, pairs: Sequence[tuple[Path, Path]]) -> ImageSet:
        pieces = [read_npy_images(self.title, images, labels, _SIDE) for images, labels in pairs]
        shapes = {tuple(piece.images.shape[1:]) for piece in pieces}
        if shapes != {self.shape}:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise DataFilesMissing(f"{self.title}: the files hold images of shape {found}, not {list(self.shape)}")
        return joined(pieces)


def _read_folder(folder: Path, num_classes: int) -> tuple[ImageSet, ImageSet]:
    identifiers = _text(folder / "wnids.txt").split()
    if len(set(identifiers)) != num_classes:
        raise DataFilesMissing(f"{folder / 'wnids.txt'} names {len(set(identifiers))} classes, not {num_classes}")
    if absent := set(identifiers) - set(class_names(folder / "train")):
        raise DataFilesMissing(f"{folder / 'train'} lacks {len(absent)} classes of wnids.txt, e.g. {min(absent)!r:.40}")
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    train = [
        (file, label)
        for identifier, label in label_of.items()
        for file in sorted((folder / "train" / identifier / "images").glob("*.JPEG"), key=_number)
    ]
    annotations = folder / "val" / "val_annotations.txt"
    test = []
    for line in _text(annotations).splitlines():
        name, identifier, *_ = [*line.split("\t"), "", ""]
        if identifier not in label_of:
            raise DataFilesMissing(f"{annotations}: the line {line!r} does not name an image and one of the classes")
        test.append((folder / "val" / "images" / name, label_of[identifier]))
    return _read_images(train), _read_images(test)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFilesMissing(f"{file} cannot be read as text: {error}") from error


def _number(file: Path) -> tuple[int, str]:
    """Sort key of a file by its number: ``n01443537_2.JPEG`` comes before ``n01443537_10.JPEG``."""
    digits = file.stem.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else -1, file.name)


def _read_images(samples: Sequence[tuple[Path, int]]) -> ImageSet:
    images = np.empty((len(samples), 3, _SIDE, _SIDE), dtype=np.uint8)
    for i, (file, _) in enumerate(samples):
        pixels = np.asarray(read_image(file, "RGB"))  # a few are stored in grey
        if pixels.shape != (_SIDE, _SIDE, 3):
            raise DataFilesMissing(f"{file} has {pixels.shape[1]} x {pixels.shape[0]} pixels, not {_SIDE} x {_SIDE}")
        images[i] = pixels.transpose(2, 0, 1)
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    return ImageSet(torch.from_numpy(images), labels)
