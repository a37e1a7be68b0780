"""``check_source``: checks the properties of a data set that streams rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cfl.data.sources import Source, data_root
from cfl.data.sources.loading import Flaw, loaded_or_flaw
from cfl.data.types import ImageSet


def check_source(source: Source, root: Path | None = None) -> None:
    """Load a data set twice and check its declared properties.

    The checks, by name:

    - ``transform``: ``mean``, ``std`` and ``scale`` fit the channels, and give finite network inputs;
    - ``images``: uint8, or finite float32 if ``is_float`` is set, ``[N, C, H, W]`` of the declared ``shape``, at least
      one in the training and in the test set;
    - ``labels``: int64 from 0 below ``num_classes``; float32 ``[N, num_classes]`` if the source's ``targets`` are
      ``numbers``; ``[N, M, 5]`` with boxes within the images if they are ``boxes``;
    - ``again``: loading again gives the same samples in the same order;
    - ``apart``: training and test set share no memory, and not all test images are training images as well.

    Args:
        source: the data set.
        root: folder of all data sets; the configured one if not given.

    Raises:
        AssertionError: a sentence with the property, the data set and what is wrong.
        DataFilesMissing: files are absent.
    """
    who = type(source).__name__
    train, test = _loaded(source, root)
    for part, images in (("training", train), ("test", test)):
        if len(images) == 0:
            raise AssertionError(f"images: the {part} set of {who} is empty")
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
    found = loaded_or_flaw(source, data_root() if root is None else root)
    if isinstance(found, Flaw):
        raise AssertionError(f"{found.part}: {type(source).__name__}, {found.found}; valid: {found.valid}")
    return found


def _shares(one: ImageSet, other: ImageSet) -> bool:
    return np.shares_memory(one.images.numpy(), other.images.numpy())
