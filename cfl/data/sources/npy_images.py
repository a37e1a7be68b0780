"""Reads images from ``.npy`` arrays in mammoth's format, one file for images and one for labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cfl.data.sources.labels import checked_labels
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing, reason

_CHUNK = 1000  # images converted at a time, so that floats never exist for a whole set


def read_npy_images(title: str, images_file: Path, labels_file: Path, side: int) -> ImageSet:
    """Colour images ``[N, side, side, 3]`` and integer labels ``[N]`` of two files.

    Args:
        title: of the data set, for messages.
        images_file: unsigned bytes, or floats that are bytes / 255.
        labels_file: integers.
        side: side of the images in pixels, for messages; the caller compares shapes.

    Raises:
        DataFilesMissing: a file is damaged or holds something else.
    """
    stored, labels = read_array(images_file), read_array(labels_file)
    if stored.ndim != 4 or labels.shape != stored.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise DataFilesMissing(
            f"{title}: {images_file} holds {stored.dtype} {list(stored.shape)}, {labels_file} {labels.dtype} "
            f"{list(labels.shape)}: expected images [N, {side}, {side}, 3] and integer labels [N]"
        )
    try:
        numbers = checked_labels(labels, "labels")
    except ValueError as error:
        raise DataFilesMissing(f"{labels_file} cannot be used: {error}") from error
    images = np.ascontiguousarray(_bytes_of(stored, images_file).transpose(0, 3, 1, 2))
    return ImageSet(torch.from_numpy(images), torch.from_numpy(numbers))


def read_array(file: Path) -> NDArray[Any]:
    """Open the array of an ``.npy`` file, whose values are read from the disk when they are used.

    Raises:
        DataFilesMissing: the file is damaged or of another kind.
    """
    try:
        stored: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises exceptions of many classes
        if any(words in str(error) for words in ("Python objects", "pickled")):  # numpy advises unsafe loading
            why = "it is damaged or another kind of file, or holds Python objects, which are not read"
            raise DataFilesMissing(f"{file} cannot be used: {why}") from error
        raise DataFilesMissing(f"{file} is damaged: {reason(error):.300}") from error
    return stored


def _bytes_of(images: NDArray[Any], file: Path) -> NDArray[np.uint8]:
    """Images as bytes 0 .. 255, from bytes or from floats that are bytes / 255.

    Raises:
        DataFilesMissing: the array has another type, or a float is no multiple of 1/255 in 0..1.
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
