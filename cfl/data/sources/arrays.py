"""Images stored as arrays in one ``.npz`` file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cfl.data.sources.files import where_else
from cfl.data.sources.labels import checked_labels, first_absent
from cfl.data.sources.npz import Claim, NpzFile, opened_npz
from cfl.data.sources.root import data_root
from cfl.data.sources.standard import KEY, StandardSource, check_shape
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers, check_numbers

_Channels = Literal["last", "first"]
_PARTS = ("train", "test")
_KEYS = tuple(f"{part}_{kind}" for part in _PARTS for kind in ("images", "labels"))
_LAYOUT = (
    "an .npz file with train_images and test_images (unsigned bytes, [N, H, W] or [N, H, W, C]) and train_labels "
    "and test_labels (integers from 0, [N])"
)


def _damaged(path: Path, reason: object) -> DataFilesMissing:
    return DataFilesMissing(f"{path} cannot be used: {reason}. Expected: {_LAYOUT}.")


def _image_shape(stored: tuple[int, ...], channels: _Channels) -> tuple[int, int, int]:
    """``(C, H, W)`` of an array ``[N, H, W]`` or ``[N, H, W, C]`` or, channels first, ``[N, C, H, W]``."""
    if len(stored) == 3:
        return 1, stored[1], stored[2]
    if channels == "first":
        return stored[1], stored[2], stored[3]
    return stored[3], stored[1], stored[2]


def _claims(file: NpzFile) -> dict[str, Claim]:
    """What the headers of all four arrays say, if they fit together."""
    if lacking := sorted(set(_KEYS) - set(file.keys)):
        raise ValueError(f"it lacks {', '.join(lacking)}")
    found = {key: file.claim(key) for key in _KEYS}
    for part in _PARTS:
        images, labels = found[f"{part}_images"], found[f"{part}_labels"]
        if images.dtype != np.uint8 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(f"{part}_images are {images.dtype}, {part}_labels {labels.dtype}")
        if len(images.shape) not in (3, 4) or labels.shape != images.shape[:1]:
            raise ValueError(f"{part}_images are {list(images.shape)}, {part}_labels {list(labels.shape)}")
        if 0 in images.shape:
            raise ValueError(f"{part}_images are {list(images.shape)}: the {part} set is empty")
    train, test = (list(found[f"{part}_images"].shape[1:]) for part in _PARTS)
    if train != test:
        raise ValueError(f"a train image is {train}, a test image {test}")
    return found


def npz_shape(path: Path, channels: _Channels = "last") -> tuple[int, int, int]:
    """``(C, H, W)`` of the images, from the arrays' headers alone.

    Raises:
        DataFilesMissing: the file is not as described in :class:`Arrays`.
    """
    try:
        with opened_npz(path) as file:
            return _image_shape(_claims(file)["train_images"].shape, channels)
    except ValueError as error:
        raise _damaged(path, error) from error


def npz_num_classes(path: Path) -> int:
    """Highest label of both sets plus one, without reading the images.

    Raises:
        DataFilesMissing: the file is not as described in :class:`Arrays`, or a label in between has no training sample.
    """
    try:
        with opened_npz(path) as file:
            _claims(file)
            train, test = (checked_labels(file.read(f"{part}_labels"), f"{part}_labels") for part in _PARTS)
    except ValueError as error:
        raise _damaged(path, error) from error
    return _counted(path, train, test)


def _counted(path: Path, train: NDArray[np.int64], test: NDArray[np.int64]) -> int:
    """Number of classes that labels show."""
    count = 1 + max(int(train.max()), int(test.max()))
    if absent := first_absent(train, count):
        gaps = f"{absent[0]:,} of its labels 0 to {count - 1} have no training sample, the first is {absent[1]}"
        meant = f" ({KEY}.num_classes: {count} says that this is meant)" if count <= len(train) else ""
        raise _damaged(path, f"{gaps}{meant}")
    return count


def read_npz(path: Path, channels: _Channels = "last") -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file as described in :class:`Arrays`.

    Raises:
        DataFilesMissing: the file is not as described there.
    """
    sets = []
    try:
        with opened_npz(path) as file:
            _claims(file)
            stored = {key: file.read(key) for key in _KEYS}
            labels = {part: checked_labels(stored[f"{part}_labels"], f"{part}_labels") for part in _PARTS}
    except ValueError as error:
        raise _damaged(path, error) from error
    for part in _PARTS:
        images = stored[f"{part}_images"]
        if images.ndim == 3:
            images = images[:, None]
        elif channels == "last":
            images = images.transpose(0, 3, 1, 2)
        sets.append(ImageSet(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels[part])))
    return sets[0], sets[1]


class Arrays(StandardSource):
    """Images of any kind from one ``.npz`` file, such as a subset of a larger data set.

    The file holds ``train_images`` and ``test_images``, uint8 ``[N, H, W]`` or ``[N, H, W, C]``, and
    ``train_labels`` and ``test_labels``, integers ``[N]`` from 0. ``shape`` and ``num_classes`` that are
    not given are read from the file when they are first asked for.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: ``[C, H, W]`` of one image; null: as in the file.
        num_classes: number of classes, some of which may have no sample; null: the highest label plus one, where every
            label below it has a training sample.
        channels: whether images with 4 dimensions are ``[N, H, W, C]`` (``last``) or ``[N, C, H, W]`` (``first``).
        scale: stored value that means 1.0, positive.
        mean: subtracted per channel, in units of ``stored / scale``; null: 0.
        std: divided by per channel, in the same units, positive; null: 1.
        max_train: keep at most this many training samples, class-balanced, at least one of each; null: all.
        max_test: likewise for the test set.

    Raises:
        ConfigError: a number that cannot work.
    """

    told_by: ClassVar[str | None] = "path"

    def __init__(
        self,
        path: str,
        shape: list[int] | None = None,
        num_classes: int | None = None,
        channels: Literal["last", "first"] = "last",
        scale: float = 255.0,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_train: int | None = None,
        max_test: int | None = None,
    ) -> None:
        if not path:
            raise ConfigError(f"{KEY}.path", path, _LAYOUT)
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        check_numbers(KEY, "(0, inf)", scale=scale)
        self.path, self.channels, self.scale = path, channels, scale
        self.name = Path(path).stem
        self._given = shape is not None and num_classes is not None
        self.may_lack_classes = num_classes is not None
        if shape is not None:
            self.shape = check_shape(shape)
        if num_classes is not None:
            self.num_classes = num_classes
        super().__init__(mean, std, max_train, max_test)

    def sizes_known(self) -> bool:
        """Whether ``shape`` and ``num_classes`` were given; the file is not opened at construction."""
        return self._given

    def _existing_file(self, needed: str) -> Path:
        file = data_root() / Path(self.path).expanduser()
        if not os.path.isfile(file):
            raise ConfigError(
                f"{KEY}.path",
                str(self.path),
                f"a file, or {KEY}.{needed} beside it: {file.absolute()} does not exist. "
                "An absolute path or CFL_DATA_ROOT names another place, and so does data.root of cfl fit",
            )
        return file

    def __getattr__(self, name: str) -> Any:
        """Read ``shape``, ``num_classes``, ``mean`` and ``std`` on first use, if they were not given."""
        if name == "shape":
            self.shape = npz_shape(self._existing_file(name), self.channels)
        elif name == "num_classes":
            self.num_classes = npz_num_classes(self._existing_file(name))
        elif name == "mean":
            self.mean = (0.0,) * self.shape[0]
        elif name == "std":
            self.std = (1.0,) * self.shape[0]
        else:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.__dict__[name]

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Both sets as stored."""
        file = root / Path(self.path).expanduser()
        if not os.path.isfile(file):
            raise DataFilesMissing(f"{file} is missing. Expected: {_LAYOUT}. {where_else(self.path)}")
        train, test = read_npz(file, self.channels)
        found = list(train.images.shape[1:])
        labels = [part.labels.numpy() for part in (train, test)]
        needed = 1 + max(int(of_part.max()) for of_part in labels) if self.may_lack_classes else _counted(file, *labels)
        if "shape" not in self.__dict__:
            self.shape = check_shape(found)
        if "num_classes" not in self.__dict__:
            self.num_classes = needed
        if list(self.shape) != found:
            raise ConfigError(f"{KEY}.shape", list(self.shape), f"{found}, the shape stored in {file}")
        if needed != self.num_classes and not self.may_lack_classes:
            valid = f"{needed}, as {file} has labels; another told how many before data.root was known"
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, valid)
        if needed > self.num_classes:
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, f"at least {needed}, see the labels in {file}")
        return train, test
