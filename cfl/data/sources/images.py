"""Reads image files, one at a time or from a folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cfl.runtime.errors import DataFilesMissing

if TYPE_CHECKING:
    from PIL import Image


def read_image(path: Path, mode: str) -> Image.Image:
    """The decoded image of a file.

    Args:
        path: the file.
        mode: ``L`` for grey, ``RGB`` for colour; other images are converted.

    Raises:
        DataFilesMissing: the file is absent, damaged, of another kind, has more pixels than Pillow decodes, or has
            values that 8 bits cannot hold.
    """
    from PIL import Image  # slow to import

    try:
        if not os.path.isfile(path):  # opening a pipe would wait for ever
            raise FileNotFoundError("there is no such file")
        with Image.open(path) as stored:
            if stored.mode in ("I", "F") or stored.mode.startswith("I;16"):
                low, high = np.asarray(stored.getextrema()).tolist()
                if not 0 <= low <= high <= 255 or (stored.mode == "F" and high <= 1):
                    raise ValueError(f"its values, {low:g} to {high:g}, are not those of 8 bits, 0 to 255")
            return stored.convert(mode)
    except Exception as error:  # Pillow's decoders raise whatever they trip over
        raise DataFilesMissing(f"{path} cannot be read as an image: {' '.join(str(error).split())}") from error


def class_names(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted.

    Raises:
        DataFilesMissing: there is none, or the folder cannot be read.
    """
    try:
        names = sorted(entry for entry in os.listdir(folder) if os.path.isdir(folder / entry))
    except OSError as error:
        raise DataFilesMissing(f"{folder} cannot be read: {error.strerror}") from error
    if not names:
        raise DataFilesMissing(f"{folder} cannot be used: it holds no folders, one for each class")
    return names


def class_images(folder: Path) -> list[tuple[Path, int]]:
    """Path and label of every ``<folder>/<class>/.../<image>``, by class, then by folder, then by name.

    Raises:
        DataFilesMissing: a class without images, a folder that cannot be read, or that symbolic links lead to twice.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS  # slow to import

    samples: list[tuple[Path, int]] = []
    known = {str(above): str(above) for above in (folder.resolve(), *folder.resolve().parents)}
    for label, name in enumerate(class_names(folder)):
        found = []
        for place, _, files in os.walk(folder / name, onerror=_refuse, followlinks=True):
            first = known.setdefault(os.path.realpath(place), place)
            if first != place:
                raise DataFilesMissing(f"{place} cannot be used: a symbolic link makes it the same folder as {first}")
            found.append((place, sorted(file for file in files if file.lower().endswith(IMG_EXTENSIONS))))
        images = [Path(place, file) for place, files in sorted(found) for file in files]
        if not images:
            raise DataFilesMissing(f"{folder / name} cannot be used: it holds no image (*{', *'.join(IMG_EXTENSIONS)})")
        samples += [(image, label) for image in images]
    return samples


def _refuse(error: OSError) -> None:
    raise DataFilesMissing(f"{error.filename} cannot be read: {error.strerror}") from error
