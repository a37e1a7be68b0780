"""Loads a data set for a stream, and checks that its samples agree with what its class announces."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.types import ImageSet, PixelTransform
from cfl.runtime.errors import FOR_USERS, ConfigError, DataFilesMissing, with_line_of_class
from cfl.runtime.memory import lack_of_memory

_LABELS = {"classes": "int64 [N]", "numbers": "float32 [N, D]", "boxes": "float32 [N, M, 5]"}


class Flaw(NamedTuple):
    """What is wrong with a data set.

    Attributes:
        part: of the data set: ``transform``, ``images``, ``labels``, ``clients`` or ``seconds``.
        found: what was found, in words that follow the class's name in a message.
        valid: what would be valid.
    """

    part: str
    found: str
    valid: str


def load_checked(source: Source, root: Path, key: str = "data.stream.source") -> tuple[ImageSet, ImageSet]:
    """Load a data set, and refuse samples that differ from what its class announces.

    Args:
        source: the data set.
        root: folder of all data sets.
        key: of the data set in the configuration, for errors.

    Raises:
        ConfigError: the data set's class announces something invalid, or its samples differ.
        DataFilesMissing: files are absent.
    """
    found = loaded_or_flaw(source, root)
    if isinstance(found, Flaw):
        raise ConfigError(key, f"{type(source).__name__}, {found.found}", found.valid)
    return found


def loaded_or_flaw(source: Source, root: Path) -> tuple[ImageSet, ImageSet] | Flaw:
    """The training and test set of a data set, or its first flaw.

    Args:
        source: the data set.
        root: folder of all data sets.

    Raises:
        ConfigError: an option contradicts the files.
        DataFilesMissing: files are absent.
    """
    if flaw := flaw_of_class(source):
        return flaw
    try:
        loaded = source.load(root)
    except FileNotFoundError as error:
        if isinstance(error, DataFilesMissing):
            raise
        raise DataFilesMissing(f"{type(source).__name__}: {error}") from error
    except Exception as error:
        return Flaw("images", f"which cannot be loaded ({failure(error, source)})", "two cfl.data.types.ImageSet")
    return flaw_of_loaded(source, loaded) or loaded


def failure(error: Exception, of: object) -> str:
    """What to say about an error in the code of a user's object.

    Raises:
        Exception: the error itself, if its own message is for users, or if files or memory are its cause.
    """
    if isinstance(error, (*FOR_USERS, OSError, MemoryError)) or lack_of_memory(error):
        raise error
    return with_line_of_class(error, type(of))


def check_announced(source: Source, key: str) -> None:
    """Refuse a data set whose class announces something invalid; read no file.

    Args:
        source: the data set.
        key: of the data set in the configuration.

    Raises:
        ConfigError: for ``key``.
    """
    if flaw := flaw_of_class(source):
        raise ConfigError(key, f"{type(source).__name__}, {flaw.found}", flaw.valid)


def flaw_of_class(source: Source) -> Flaw | None:
    """The first flaw in what a data set's class announces; None if there is none.

    Sizes and names of other types, such as numpy's, become tuples, int and str, on which all that follows relies."""
    for name, part in (("shape", "images"), ("num_classes", "labels"), ("mean", "transform"), ("std", "transform")):
        if not hasattr(source, name):
            return Flaw(part, f"without {name}", "one that is known without reading a file")
    shape, classes = source.shape, source.num_classes
    if not isinstance(shape, Sequence) or len(shape) != 3 or not all(map(_is_count, shape)):
        return Flaw("images", f"whose shape is {shape!r}", "(C, H, W), three integers of at least 1")
    if not _is_count(classes):
        return Flaw("labels", f"whose num_classes is {classes!r}", "an integer of at least 1")
    if source.targets not in _LABELS:
        return Flaw("labels", f"whose targets are {source.targets!r}", " or ".join(_LABELS))
    for name, values in (("mean", source.mean), ("std", source.std)):
        if not isinstance(values, Sequence) or not all(isinstance(value, numbers.Real) for value in values):
            return Flaw("transform", f"whose {name} is {values!r}", "a number per channel")
        if len(values) != shape[0]:
            return Flaw("transform", f"with {len(values)} numbers for {name} and {shape[0]} channels", "one for each")
        if not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
            valid = f"finite numbers{' above 0' if name == 'std' else ''}"
            return Flaw("transform", f"whose {name} is {tuple(values)}", valid)
    if not isinstance(source.scale, numbers.Real) or not 0 < source.scale < math.inf:
        return Flaw("transform", f"whose scale is {source.scale!r}", "the positive value that means 1")
    if len(source.class_names) not in (0, classes):
        found = f"with {len(source.class_names)} class_names and {classes} classes"
        return Flaw("labels", found, "one for each, or none")
    return _flaw_of_types(source)


def _flaw_of_types(source: Source) -> Flaw | None:
    """Give sizes and names the types that :class:`Source` declares; a flaw if the class does not let them be set."""
    for name, part, typed in (
        ("shape", "images", tuple(map(int, source.shape))),
        ("num_classes", "labels", int(source.num_classes)),
        ("class_names", "labels", tuple(map(str, source.class_names))),
    ):
        given = getattr(source, name)
        if _types(given) == _types(typed):
            continue
        try:
            setattr(source, name, typed)
        except AttributeError:
            return Flaw(part, f"whose {name} is {given!r}, which cannot be set", f"{typed!r}")
    return None


def _types(value: object) -> list[type]:
    """The type of a value, and of its entries if it is a tuple."""
    return [type(value), *map(type, value if isinstance(value, tuple) else ())]


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def flaw_of_loaded(source: Source, loaded: object) -> Flaw | None:
    """The first flaw by which loaded samples differ from what a data set announces; None if there is none."""
    if not (isinstance(loaded, tuple) and len(loaded) == 2 and all(isinstance(part, ImageSet) for part in loaded)):
        kinds = [type(part).__name__ for part in loaded] if isinstance(loaded, tuple) else type(loaded).__name__
        return Flaw("images", f"whose load gives {kinds}", "two cfl.data.types.ImageSet, for training and tests")
    train, test = loaded
    flaw = flaw_of_samples(train, test, source.shape, source.targets, source.num_classes)
    if flaw is not None:
        return flaw
    if train.images.is_floating_point() != source.is_float:  # predictions tell stored values from network input by it
        found = f"whose images are {str(train.images.dtype).removeprefix('torch.')} and is_float is {source.is_float}"
        return Flaw("images", found, "is_float True for float32, False for uint8")
    try:
        transform = source.transform()
    except Exception as error:
        found = f"whose transform fails ({failure(error, source)})"
        return Flaw("transform", found, "a cfl.data.types.PixelTransform")
    return flaw_of_transform(transform, train.images)


def flaw_of_samples(
    train: ImageSet, test: ImageSet, shape: Sequence[int], targets: str, num_classes: int
) -> Flaw | None:
    """The first flaw by which samples differ from what is announced; None if there is none.

    Args:
        train: training samples.
        test: test samples.
        shape: ``(C, H, W)`` of every image.
        targets: kind of the labels.
        num_classes: number of classes, or of values to predict.
    """
    for part, images in (("training", train), ("test", test)):
        flaw = _flaw_of_images(shape, part, images) or _flaw_of_labels(targets, num_classes, shape, part, images)
        if flaw is not None:
            return flaw
    if train.images.dtype != test.images.dtype:
        found = f"whose training images are {_kind(train.images)} and test images {_kind(test.images)}"
        return Flaw("images", found, "one type for both")
    return None


def flaw_of_transform(transform: object, images: Tensor) -> Flaw | None:
    """The first flaw of a transform for images ``[N, C, H, W]``, tried on some of them; None if there is none."""
    some, pixels = images[:8], images.shape[-2] * images.shape[-1]
    if not isinstance(transform, PixelTransform):
        found = f"whose transform is {type(transform).__name__}"
        return Flaw("transform", found, "a cfl.data.types.PixelTransform")
    index = transform.pixel_map
    if index is not None and (index.dtype, index.shape) != (torch.int64, (pixels,)):
        return Flaw("transform", f"whose pixel_map is {_kind(index)}", f"int64 [{pixels}]")
    if index is not None and not -1 <= int(index.min()) <= int(index.max()) < pixels:
        found = f"whose pixel_map runs from {int(index.min())} to {int(index.max())}"
        return Flaw("transform", found, f"-1 for black, else 0 to {pixels - 1}")
    try:
        made = transform(some)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return Flaw("transform", f"whose transform fails ({said})", f"one that takes {_kind(some)}")
    if (made.shape, made.dtype) != (some.shape, torch.float32):
        return Flaw("transform", f"whose transform makes {_kind(made)}", f"float32 {list(some.shape)}")
    if not bool(made.isfinite().all()):
        return Flaw("transform", "whose transform makes NaN or infinity", "finite numbers")
    return None


def _flaw_of_images(shape: Sequence[int], part: str, images: ImageSet) -> Flaw | None:
    found = list(images.images.shape[1:])
    if found != list(shape):
        return Flaw("images", f"whose {part} images have the shape {found}", f"the announced {list(shape)}")
    # The extremes, which are NaN if any value is: isfinite would need as much memory as the images.
    if images.images.is_floating_point() and len(images) and not all(map(math.isfinite, images.images.aminmax())):
        return Flaw("images", f"whose {part} images hold NaN or infinity", "finite numbers")
    if images.clients is not None and bool((images.clients < 0).any()):
        lowest = f"whose {part} samples have the client {int(images.clients.min())}"
        return Flaw("clients", lowest, "integers from 0")
    if images.seconds is not None and not bool((images.seconds.isfinite() & (images.seconds >= 0)).all()):
        return Flaw("seconds", f"of whose {part} samples some last NaN or negative seconds", "finite numbers from 0")
    return None


def _flaw_of_labels(targets: str, num_classes: int, shape: Sequence[int], part: str, images: ImageSet) -> Flaw | None:
    labels = images.labels
    if labels.ndim != list(_LABELS).index(targets) + 1:
        return Flaw(
            "labels", f"whose {part} labels are {_kind(labels)}", f"the announced {targets}, {_LABELS[targets]}"
        )
    if not len(labels):
        return None
    if targets == "classes":
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest >= 0 and highest < num_classes:
            return None
        found = f"whose {part} labels run from {lowest} to {highest}"
        return Flaw("labels", found, f"0 to {num_classes - 1}, the announced {num_classes} classes")
    width = num_classes if targets == "numbers" else 5
    if labels.shape[-1] != width or not bool(labels.isfinite().all()):
        found = f"whose {part} labels are {list(labels.shape)}, or not finite"
        return Flaw("labels", found, f"{width} finite numbers each")
    if targets == "boxes" and not _boxes_are_within(shape, num_classes, images):
        valid = f"left, top, right and bottom within {shape[2]} x {shape[1]}, classes below"
        return Flaw("labels", f"whose {part} boxes are not within its images", f"{valid} {num_classes}")
    return None


def _boxes_are_within(shape: Sequence[int], num_classes: int, images: ImageSet) -> bool:
    real = images.labels[images.labels[..., 0] >= 0]
    limits = torch.tensor([shape[2], shape[1]] * 2)
    within = (real[:, 1:] >= 0).all() and (real[:, 1:] <= limits).all() and (real[:, 3:] > real[:, 1:3]).all()
    return bool(within) and bool((real[:, 0] < num_classes).all())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
