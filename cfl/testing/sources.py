"""``check_source``: checks the properties of a data set that streams rely on."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from cfl.data.sources import Source, data_root
from cfl.data.types import ImageSet
from cfl.testing.method_case import told


def check_source(source: Source, root: Path | None = None) -> None:
    """Load a data set twice and check its declared properties.

    The checks, by name:

    - ``transform``: ``mean``, ``std`` and ``scale`` fit the channels, and give finite network inputs;
    - ``images``, ``labels``: uint8 ``[N, C, H, W]`` of the declared ``shape``, int64 from 0 below ``num_classes``,
      or float32 ``[N, num_classes]`` if it announces ``numbers``, or ``[N, M, 5]`` with boxes within the images if it
      announces ``boxes``; at least one sample in the training and in the test set;
    - ``again``: loading again gives the same samples in the same order, also if the first ones were changed;
    - ``apart``: training and test set share no memory, and not all test images are training images as well.

    Args:
        source: the data set.
        root: folder of all data sets; the configured one if not given.

    Raises:
        AssertionError: a sentence with the property, the data set and what is wrong.
    """
    who = type(source).__name__
    train, test = _loaded(source, root)
    _check_transform(who, source, train)
    for part, images in (("training", train), ("test", test)):
        _check_part(who, source, part, images)
    again = _loaded(source, root)
    for part, one, other in zip(("training", "test"), (train, test), again, strict=True):
        if not torch.equal(one.images, other.images) or not torch.equal(one.labels, other.labels):
            raise AssertionError(f"again: {who} gives other {part} samples when it is loaded once more")
    if _shares(train, test):
        raise AssertionError(
            f"apart: training and test set of {who} are the same memory: what changes one changes both"
        )
    known = {image.numpy().tobytes() for image in train.images}
    if all(image.numpy().tobytes() in known for image in test.images):
        raise AssertionError(f"apart: every test image of {who} is a training image as well")


def _loaded(source: Source, root: Path | None) -> tuple[ImageSet, ImageSet]:
    loaded = source.load(data_root() if root is None else root)
    if not (isinstance(loaded, tuple) and len(loaded) == 2 and all(isinstance(part, ImageSet) for part in loaded)):
        raise AssertionError(f"images: load of {type(source).__name__} gives no pair of ImageSets: {loaded!r:.80}")
    return loaded


def _check_transform(who: str, source: Source, train: ImageSet) -> None:
    channels = source.shape[0]
    for name in ("mean", "std"):
        values = getattr(source, name)
        if len(values) != channels:
            raise AssertionError(f"transform: {who} has {len(values)} numbers for {name} and {channels} channels")
        if not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
            raise AssertionError(f"transform: {name} = {values} of {who} cannot normalise")
    if not source.scale > 0:
        raise AssertionError(f"transform: scale = {source.scale} of {who} is not positive")
    try:
        found = source.transform()(train.images[:8])
    except Exception as error:
        raise AssertionError(f"transform: {who} cannot transform its images: {told(error)}") from error
    if found.shape != train.images[:8].shape or found.dtype != torch.float32 or not bool(found.isfinite().all()):
        kind = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise AssertionError(f"transform: {who} makes {kind} of {list(train.images[:8].shape)}, or not finite numbers")


def _check_part(who: str, source: Source, part: str, images: ImageSet) -> None:
    if len(images) == 0:
        raise AssertionError(f"images: the {part} set of {who} is empty")
    if tuple(images.images.shape[1:]) != tuple(source.shape):
        found = list(images.images.shape[1:])
        raise AssertionError(f"images: {part} images of {who} have shape {found}; it announces {list(source.shape)}")
    wanted = {"classes": 1, "numbers": 2, "boxes": 3}[source.targets]
    if images.labels.ndim != wanted:
        kind = f"{images.labels.dtype} with {images.labels.ndim} dimensions"
        raise AssertionError(f"labels: {part} labels of {who} are {kind}; it announces {source.targets}")
    if source.targets != "classes":
        width = source.num_classes if source.targets == "numbers" else 5
        if images.labels.shape[-1] != width or not bool(images.labels.isfinite().all()):
            shape = f"{list(images.labels.shape)}, or not finite"
            raise AssertionError(f"labels: {part} labels of {who} are {shape}; valid: {width} finite numbers each")
    if source.targets == "boxes":
        _check_boxes(who, source, part, images)
    if source.targets != "classes":
        return
    lowest, highest = int(images.labels.min()), int(images.labels.max())
    if lowest < 0 or highest >= source.num_classes:
        raise AssertionError(
            f"labels: {part} labels of {who} run from {lowest} to {highest}; it announces {source.num_classes} classes"
        )


def _check_boxes(who: str, source: Source, part: str, images: ImageSet) -> None:
    real = images.labels[images.labels[..., 0] >= 0]
    limits = torch.tensor([source.shape[2], source.shape[1]] * 2)
    within = (real[:, 1:] >= 0).all() and (real[:, 1:] <= limits).all() and (real[:, 3:] > real[:, 1:3]).all()
    if not bool(within) or not bool((real[:, 0] < source.num_classes).all()):
        valid = f"left, top, right and bottom within {source.shape[2]} x {source.shape[1]}, classes below"
        raise AssertionError(
            f"labels: {part} boxes of {who} are not within its images; valid: {valid} {source.num_classes}"
        )


def _shares(one: ImageSet, other: ImageSet) -> bool:
    return one.images.untyped_storage().data_ptr() == other.images.untyped_storage().data_ptr()
