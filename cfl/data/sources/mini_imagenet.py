"""mini-ImageNet cut for continual learning: every class in both sets, as arrays or as image files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.folder import ImageFolder, read_class_folders
from cfl.data.sources.split import stratified_split
from cfl.data.sources.standard import StandardSource
from cfl.data.types import ImageSet
from cfl.errors import DataFilesMissing

_log = logging.getLogger(__name__)
_PUBLISHED = (50_000, 10_000)
_ADDRESS = "https://unimore365-my.sharepoint.com/:u:/g/personal/263133_unimore_it/EYLmey_IMdVPtGCrCBx_CCMBToexGLjdFVy5mz5mo3Wpcg?download=1"
_CHUNK = 1000  # images converted at a time, so that floats never exist for a whole set


def _read_array(file: Path) -> NDArray[Any]:
    try:
        stored: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataFilesMissing(f"{file} is damaged: {error}") from error
    return stored


def _bytes_of(images: NDArray[Any], file: Path) -> NDArray[np.uint8]:
    """Stored values 0 .. 255, also where the file holds them divided by 255.

    Raises:
        DataFilesMissing: a value that is none of these, so that rounding would change the image.
    """
    if images.dtype == np.uint8:
        return images
    if images.dtype not in (np.float32, np.float64):
        raise DataFilesMissing(f"{file} holds {images.dtype}: expected unsigned bytes, or 32 or 64 bit floats in 0..1")
    whole = np.empty(images.shape, dtype=np.uint8)
    for start in range(0, len(images), _CHUNK):
        scaled = images[start : start + _CHUNK].astype(np.float64) * 255
        rounded = np.clip(np.rint(scaled), 0, 255)
        if not (np.abs(scaled - rounded) < 1e-3).all():
            raise DataFilesMissing(f"{file} holds floats that are no multiples of 1/255 in 0..1: normalised images?")
        whole[start : start + _CHUNK] = rounded
    return whole


def _read_part(images_file: Path, labels_file: Path) -> ImageSet:
    stored, labels = _read_array(images_file), _read_array(labels_file)
    if stored.ndim != 4 or labels.shape != stored.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise DataFilesMissing(
            f"MiniImageNet: {images_file} holds {stored.dtype} {list(stored.shape)}, {labels_file} {labels.dtype} "
            f"{list(labels.shape)}: expected images [N, 84, 84, 3] and integer labels [N]"
        )
    images = np.ascontiguousarray(_bytes_of(stored, images_file).transpose(0, 3, 1, 2))
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


class MiniImageNet(StandardSource):
    """100 classes of ImageNet photographs, 500 + 100 of each, 84x84 in colour (Vinyals et al., 2016).

    The set was made for few-shot learning with disjoint classes for training and testing; here every class is in both
    sets, 500 images for training and 100 for testing. The first of these layouts that is found is used:

    1. ``<root>/MINIIMG/{train,test}_{x,y}.npy``: images ``[N, 84, 84, 3]`` as unsigned bytes, or as floats that are
       bytes / 255, and integer labels ``[N]``. These are mammoth's files (aimagelab, data set ``seq-miniimg``), which
       FOT used; classes are numbered as there.
    2. ``<root>/mini-imagenet/{train,test}/<class>/``: image files; classes are numbered by name.
    3. ``<root>/mini-imagenet/images/<class>/``: all image files; a sixth of each class becomes the test set, the same
       in every run.

    Image files of another size are scaled to 84x84. Layouts 2 and 3 number the classes, and 3 also divides them,
    otherwise than FOT's files. Nothing is downloaded. Default normalisation: FOT's, that of the training pixels.

    Args:
        mean: subtracted per channel, in units of ``stored / 255``; null: 0.4731, 0.4491, 0.4038.
        std: divided by per channel, in the same units, positive; null: 0.2729, 0.2656, 0.2795.
        max_train: keep at most this many training samples, class-balanced, at least one of each; null: all.
        max_test: likewise for the test set.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "mini-imagenet"
    shape = (3, 84, 84)
    num_classes = 100
    mean = (0.47313006, 0.44905752, 0.40378186)
    std = (0.27292014, 0.26559181, 0.27953038)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Both sets, from the first layout found."""
        sets = self._read_found(root)
        for part, images in zip(("training", "test"), sets, strict=True):
            present = len(images.labels.unique())
            if present < self.num_classes:
                raise DataFilesMissing(
                    f"MiniImageNet under {root}: the {part} set has {present} classes, not {self.num_classes}. The "
                    "few-shot splits have other classes for testing than for training and cannot be used as they are"
                )
        found = (len(sets[0]), len(sets[1]))
        if found != _PUBLISHED:
            _log.warning(
                "MiniImageNet under %s has %d training and %d test samples; the published set has %d and %d",
                *(root, *found, *_PUBLISHED),
            )
        return sets

    def _read_found(self, root: Path) -> tuple[ImageSet, ImageSet]:
        arrays, folder = root / "MINIIMG", root / "mini-imagenet"
        files = [arrays / f"{part}_{kind}.npy" for part in ("train", "test") for kind in "xy"]
        if all(file.is_file() for file in files):
            return _read_part(*files[:2]), _read_part(*files[2:])
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return ImageFolder(str(folder), list(self.shape)).read(Path())
        if (folder / "images").is_dir():
            return stratified_split(read_class_folders(folder / "images", self.shape), 1 / 6)
        states = "\n".join(f"  {file} ({'present' if file.is_file() else 'missing'})" for file in files)
        raise DataFilesMissing(
            f"MiniImageNet: files are missing. Expected either\n{states}\n"
            f"from mammoth's archive miniImagenet.zip, to be fetched with a browser: {_ADDRESS}\nor\n"
            f"  {folder}/train and {folder}/test: in each one folder per class, with 500 and 100 images\nor\n"
            f"  {folder}/images: one folder per class, with 600 images to be divided\n{WHERE_ELSE}"
        )
