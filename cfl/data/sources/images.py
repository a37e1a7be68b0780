"""Reads image files, one at a time or from a folder for each class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.runtime.errors import DataFilesMissing, reason

if TYPE_CHECKING:
    from PIL import Image


MODES = {1: "L", 3: "RGB"}
"""Number of channels -> Pillow's name for such images."""
_WHITE = 255


def read_image(path: Path, mode: str, fewer_channels: bool = True) -> Image.Image:
    """The decoded image of a file.

    Args:
        path: the file.
        mode: ``L`` for grey, ``RGB`` for colour; other images are converted.
        fewer_channels: whether the conversion may turn colour into grey, or drop a channel for transparency.

    Raises:
        DataFilesMissing: the file is absent, damaged, of another kind, has more pixels than Pillow decodes, has values
            that 8 bits cannot hold, or more channels than ``mode`` if these may not become fewer.
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
            bands = ("R", "G", "B") if stored.mode == "P" else stored.getbands()
            if not fewer_channels and len(bands) > len(mode):
                raise ValueError(f"it has {len(bands)} channels ({''.join(bands)}), not {len(mode)}")
            return stored.convert(mode)
    except Exception as error:  # Pillow's decoders raise exceptions of many classes
        raise DataFilesMissing(f"{path} cannot be read as an image: {reason(error)}") from error


def stored_image(path: Path, shape: tuple[int, int, int], scale: float) -> Tensor:
    """Read an image file as ``[C, H, W]`` uint8, with only the value of white changed.

    Args:
        path: the file, in which white is 255.
        shape: ``(C, H, W)`` that it must have; C may be 3 for a grey image.
        scale: value of white in the result.

    Raises:
        DataFilesMissing: as for :func:`read_image`, or the image has another size or more channels.
    """
    channels, height, width = shape
    if channels not in MODES:
        expected = f"an .npz or .npy file with arrays of the run's shape, {list(shape)}: no image file has it"
        raise DataFilesMissing(f"{path} cannot be used; expected: {expected}")
    image = read_image(path, MODES[channels], fewer_channels=False)
    if image.size != (width, height):
        raise DataFilesMissing(f"{path} has {image.width} x {image.height} pixels, not {width} x {height}")
    pixels = pixels_of(image)
    return pixels if scale == _WHITE else (pixels * (scale / _WHITE)).round().to(torch.uint8)


def pixels_of(image: Image.Image) -> Tensor:
    """``[C, H, W]`` uint8 of an image in one of :data:`MODES`."""
    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def images_of_array(
    stored: NDArray[Any], shape: tuple[int, int, int], channels: str = "last", is_float: bool = False
) -> Tensor:
    """``[N, C, H, W]`` uint8 or float32 of an array ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``.

    Args:
        stored: the array.
        shape: ``(C, H, W)`` that each image must have.
        channels: where the channels are, ``last`` or ``first``, if the shape fits both.
        is_float: whether the array must hold floating-point numbers, which become float32, instead of uint8.

    Raises:
        ValueError: another type or shape, or numbers that are not finite in float32.
    """
    c, h, w = shape
    layouts = {"last": (h, w, c), "first": (c, h, w)}
    fitting = [place for place, layout in layouts.items() if stored.shape[1:] == layout]
    of_kind = np.issubdtype(stored.dtype, np.floating) if is_float else stored.dtype == np.uint8
    if not of_kind or not (fitting or (c == 1 and stored.shape[1:] == (h, w))):
        grey = f"[N, {h}, {w}], " if c == 1 else ""
        valid = f"{'floating-point' if is_float else 'uint8'} {grey}[N, {h}, {w}, {c}] or [N, {c}, {h}, {w}]"
        raise ValueError(f"it is {stored.dtype} {list(stored.shape)}, not {valid}")
    if not fitting:
        stored = stored[:, None]
    elif (channels if channels in fitting else fitting[0]) == "last":
        stored = stored.transpose(0, 3, 1, 2)
    if not is_float:
        return torch.from_numpy(np.array(stored, order="C"))
    if not np.isfinite(stored).all():
        raise ValueError("it holds NaN or infinity")
    with np.errstate(over="ignore"):  # is refused below
        found = np.array(stored, dtype=np.float32, order="C")
    if not np.isfinite(found).all():
        raise ValueError("it holds numbers that float32 cannot")
    return torch.from_numpy(found)


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and in those below it, by folder, then by name.

    Raises:
        DataFilesMissing: there is none, or a folder that cannot be read.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS  # slow to import

    found = sorted(os.walk(folder, onerror=_refuse))
    images = [Path(place, file) for place, _, files in found for file in sorted(files)]
    images = [image for image in images if image.name.lower().endswith(IMG_EXTENSIONS)]
    if not images:
        raise DataFilesMissing(f"{folder} cannot be used: it holds no image (*{', *'.join(IMG_EXTENSIONS)})")
    return images


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
