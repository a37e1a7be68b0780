"""Loads a data set for a stream, and checks that its samples agree with what its class announces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cfl.data.sources.base import Source
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing

_WIDTH = {"classes": 1, "numbers": 2, "boxes": 3}


class Flaw(NamedTuple):
    """What is wrong with a data set.

    Attributes:
        part: of the data set: ``transform``, ``images`` or ``labels``.
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
    who = type(source).__name__
    flaw = flaw_of_class(source)
    if flaw is None:
        try:
            loaded = source.load(root)
        except (ConfigError, DataFilesMissing):
            raise
        except FileNotFoundError as error:
            raise DataFilesMissing(f"{who}: {error}") from error
        except (AttributeError, TypeError, ValueError) as error:
            flaw = Flaw("images", f"which cannot be loaded ({error})", "two cfl.data.types.ImageSet")
        else:
            flaw = flaw_of_loaded(source, loaded)
    if flaw is not None:
        raise ConfigError(key, f"{who}, {flaw.found}", flaw.valid)
    return loaded


def flaw_of_class(source: Source) -> Flaw | None:
    """The first flaw in how a data set is normalised; None if there is none."""
    channels = source.shape[0]
    for name, values in (("mean", source.mean), ("std", source.std)):
        if not isinstance(values, Sequence):
            return Flaw("transform", f"whose {name} is {values!r}", "a number per channel")
        if len(values) != channels:
            return Flaw("transform", f"with {len(values)} numbers for {name} and {channels} channels", "one for each")
        if not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
            valid = f"finite numbers{' above 0' if name == 'std' else ''}"
            return Flaw("transform", f"whose {name} is {tuple(values)}", valid)
    if not source.scale > 0:
        return Flaw("transform", f"whose scale is {source.scale}", "the positive value that means 1")
    return None


def flaw_of_loaded(source: Source, loaded: object) -> Flaw | None:
    """The first flaw by which loaded samples differ from what a data set announces; None if there is none."""
    if not (isinstance(loaded, tuple) and len(loaded) == 2 and all(isinstance(part, ImageSet) for part in loaded)):
        kinds = [type(part).__name__ for part in loaded] if isinstance(loaded, tuple) else type(loaded).__name__
        return Flaw("images", f"whose load gives {kinds}", "two cfl.data.types.ImageSet, for training and tests")
    for part, images in zip(("training", "test"), loaded, strict=True):
        flaw = _flaw_of_images(source, part, images) or _flaw_of_labels(source, part, images)
        if flaw is not None:
            return flaw
    return None


def _flaw_of_images(source: Source, part: str, images: ImageSet) -> Flaw | None:
    found = list(images.images.shape[1:])
    if found != list(source.shape):
        return Flaw("images", f"whose {part} images have the shape {found}", f"the announced {list(source.shape)}")
    if images.images.is_floating_point() and not bool(images.images.isfinite().all()):
        return Flaw("images", f"whose {part} images hold NaN or infinity", "finite numbers")
    return None


def _flaw_of_labels(source: Source, part: str, images: ImageSet) -> Flaw | None:
    labels = images.labels
    if labels.ndim != _WIDTH[source.targets]:
        kind = f"{str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}"
        return Flaw("labels", f"whose {part} labels are {kind}", f"the announced {source.targets}")
    if not len(labels):
        return None
    if source.targets == "classes":
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest >= 0 and highest < source.num_classes:
            return None
        found = f"whose {part} labels run from {lowest} to {highest}"
        return Flaw("labels", found, f"0 to {source.num_classes - 1}, the announced {source.num_classes} classes")
    width = source.num_classes if source.targets == "numbers" else 5
    if labels.shape[-1] != width or not bool(labels.isfinite().all()):
        found = f"whose {part} labels are {list(labels.shape)}, or not finite"
        return Flaw("labels", found, f"{width} finite numbers each")
    if source.targets == "boxes" and not _boxes_are_within(source, images):
        valid = f"left, top, right and bottom within {source.shape[2]} x {source.shape[1]}, classes below"
        return Flaw("labels", f"whose {part} boxes are not within its images", f"{valid} {source.num_classes}")
    return None


def _boxes_are_within(source: Source, images: ImageSet) -> bool:
    real = images.labels[images.labels[..., 0] >= 0]
    limits = torch.tensor([source.shape[2], source.shape[1]] * 2)
    within = (real[:, 1:] >= 0).all() and (real[:, 1:] <= limits).all() and (real[:, 3:] > real[:, 1:3]).all()
    return bool(within) and bool((real[:, 0] < source.num_classes).all())
