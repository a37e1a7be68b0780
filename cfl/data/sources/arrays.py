"""Images stored as arrays in one ``.npz`` file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cfl.data.sources.files import where_else
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


def _read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        raise _damaged(path, "it is no .npz archive, or cut off")
    try:
        with np.load(path, allow_pickle=False) as stored:
            lacking = sorted(set(_KEYS) - set(stored.files))
            if lacking:
                raise ValueError(f"it lacks {', '.join(lacking)}")
            return {key: stored[key] for key in keys}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise _damaged(path, error) from error


def _image_shape(stored: tuple[int, ...], channels: _Channels) -> tuple[int, int, int]:
    """``(C, H, W)`` of an array ``[N, H, W]`` or ``[N, H, W, C]`` or, channels first, ``[N, C, H, W]``."""
    if len(stored) == 3:
        return 1, stored[1], stored[2]
    if len(stored) != 4:
        raise ValueError(f"images have {len(stored)} dimensions, not 3 or 4")
    if channels == "first":
        return stored[1], stored[2], stored[3]
    return stored[3], stored[1], stored[2]


def npz_shape(path: Path, channels: _Channels = "last") -> tuple[int, int, int]:
    """``(C, H, W)`` of the training images, from the array's header alone.

    Raises:
        DataFilesMissing: the file is not as described in :class:`Arrays`.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open("train_images.npy") as member:
            version = np.lib.format.read_magic(member)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return _image_shape(header(member)[0], channels)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise _damaged(path, error) from error


def npz_num_classes(path: Path) -> int:
    """Highest label of both sets plus one, without reading the images.

    Raises:
        DataFilesMissing: the file is not as described in :class:`Arrays`.
    """
    labels = _read_npz(path, ("train_labels", "test_labels"))
    return 1 + max((int(values.max()) for values in labels.values() if values.size), default=-1)


def read_npz(path: Path, channels: _Channels = "last") -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file as described in :class:`Arrays`.

    Raises:
        DataFilesMissing: the file is not as described there.
    """
    stored = _read_npz(path, _KEYS)
    sets = []
    for part in _PARTS:
        images, labels = stored[f"{part}_images"], stored[f"{part}_labels"]
        if images.dtype != np.uint8 or not np.issubdtype(labels.dtype, np.integer):
            raise _damaged(path, f"{part}_images are {images.dtype}, {part}_labels {labels.dtype}")
        if images.ndim not in (3, 4) or labels.shape != images.shape[:1]:
            raise _damaged(path, f"{part}_images are {list(images.shape)}, {part}_labels {list(labels.shape)}")
        if images.ndim == 3:
            images = images[:, None]
        elif channels == "last":
            images = images.transpose(0, 3, 1, 2)
        sets.append(ImageSet(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))))
    return sets[0], sets[1]


class Arrays(StandardSource):
    """Images of any kind from one ``.npz`` file, such as a subset of a larger data set.

    The file holds ``train_images`` and ``test_images``, uint8 ``[N, H, W]`` or ``[N, H, W, C]``, and
    ``train_labels`` and ``test_labels``, integers ``[N]`` from 0. ``shape`` and ``num_classes`` that are
    not given are read from the file when they are first asked for.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: ``[C, H, W]`` of one image; null: as in the file.
        num_classes: number of classes; null: the highest label plus one.
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
        self._counted_as_given = num_classes is not None
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
        if not file.is_file():
            raise ConfigError(
                f"{KEY}.path",
                str(self.path),
                f"a file, or {KEY}.{needed} beside it: {file.absolute()} does not exist. The option data.root "
                "is not known at this point; an absolute path or CFL_DATA_ROOT is",
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
        if not file.is_file():
            raise DataFilesMissing(f"{file} is missing. Expected: {_LAYOUT}. {where_else(self.path)}")
        train, test = read_npz(file, self.channels)
        found = list(train.images.shape[1:])
        needed = 1 + max((int(part.labels.max()) for part in (train, test) if len(part)), default=-1)
        if "shape" not in self.__dict__:
            self.shape = check_shape(found)
        if "num_classes" not in self.__dict__:
            self.num_classes = needed
        if list(self.shape) != found:
            raise ConfigError(f"{KEY}.shape", list(self.shape), f"{found}, the shape stored in {file}")
        if needed != self.num_classes and not self._counted_as_given:
            valid = f"{needed}, as {file} has labels; another told how many before data.root was known"
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, valid)
        if needed > self.num_classes:
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, f"at least {needed}, see the labels in {file}")
        return train, test
