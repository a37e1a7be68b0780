"""Images stored as arrays in one ``.npz`` file."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.files import where_else
from cfl.data.sources.images import MODES, images_of_array
from cfl.data.sources.kept import known_of
from cfl.data.sources.labels import checked_labels, checked_numbers, first_absent
from cfl.data.sources.npz import Claim, NpzFile, opened_npz
from cfl.data.sources.root import data_root
from cfl.data.sources.standard import KEY, StandardSource, check_numbers_alone, check_shape
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers, check_numbers

_PARTS = ("train", "test")
CLIENTS, NAMES = "train_clients", "class_names"
"""Names of optional arrays of a file."""


class Layout(NamedTuple):
    """The names, types and dimensions of the arrays of a file.

    Attributes:
        kind: kind of the samples, whose arrays are named ``train_<kind>`` and ``test_<kind>``.
        about: description of the whole file, for messages.
        has_type: function that tells whether samples may have a given type.
        dimensions: numbers of dimensions that the arrays may have.
    """

    kind: str
    about: str
    has_type: Callable[[np.dtype[Any]], bool]
    dimensions: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays that a file must have."""
        return tuple(f"{part}_{kind}" for part in _PARTS for kind in (self.kind, "labels"))


IMAGES = Layout(
    "images",
    "an .npz file with train_images and test_images (unsigned bytes, [N, H, W] or [N, H, W, C]) and train_labels "
    "and test_labels (integers from 0, [N])",
    lambda dtype: dtype == np.uint8,
    (3, 4),
)


def _damaged(path: Path, reason: object, layout: Layout, numbers: bool = False) -> DataFilesMissing:
    about = layout.about.replace("integers from 0, [N]", "numbers, [N] or [N, D]") if numbers else layout.about
    return DataFilesMissing(f"{path} cannot be used: {reason}. Expected: {about}.")


def _claims(file: NpzFile, layout: Layout, numbers: bool = False) -> dict[str, Claim]:
    """Return the headers of all four arrays after checking that they fit together."""
    if lacking := sorted(set(layout.keys) - set(file.keys)):
        raise ValueError(f"it lacks {', '.join(lacking)}")
    found, kind = {key: file.claim(key) for key in layout.keys}, layout.kind
    for part in _PARTS:
        samples, labels = found[f"{part}_{kind}"], found[f"{part}_labels"]
        if not layout.has_type(samples.dtype) or labels.dtype.kind not in ("iuf" if numbers else "iu"):
            raise ValueError(f"{part}_{kind} are {samples.dtype}, {part}_labels {labels.dtype}")
        fit = labels.shape[:1] == samples.shape[:1] and len(labels.shape) in ((1, 2) if numbers else (1,))
        if len(samples.shape) not in layout.dimensions or not fit:
            raise ValueError(f"{part}_{kind} are {list(samples.shape)}, {part}_labels {list(labels.shape)}")
        if 0 in samples.shape or 0 in labels.shape:
            raise ValueError(f"{part}_{kind} are {list(samples.shape)}: the {part} set is empty")
    train, test = (list(found[f"{part}_{kind}"].shape[1:]) for part in _PARTS)
    widths = [_width(found[f"{part}_labels"].shape) for part in _PARTS]
    if numbers and widths[0] != widths[1]:
        raise ValueError(f"a train sample has {widths[0]} numbers to predict, a test sample {widths[1]}")
    if train != test:
        one = kind.removesuffix("s")
        raise ValueError(f"a train {one} is {train}, a test {one} {test}")
    return found


def _width(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) == 1 else shape[1]


def stored_shape(path: Path, layout: Layout, numbers: bool = False) -> tuple[int, ...]:
    """Shape of the array of training samples, from its header alone.

    Raises:
        DataFilesMissing: the file does not have the layout.
    """
    try:
        with opened_npz(path) as file:
            return _claims(file, layout, numbers)[f"train_{layout.kind}"].shape
    except ValueError as error:
        raise _damaged(path, error, layout, numbers) from error


def npz_num_classes(path: Path, layout: Layout, numbers: bool = False) -> int:
    """Highest label of both sets plus one, or how many numbers a label has, without reading the samples.

    Raises:
        DataFilesMissing: the file does not have the layout, or a label in between has no training sample.
    """
    try:
        with opened_npz(path) as file:
            found = _claims(file, layout, numbers)
            if numbers:
                return _width(found["train_labels"].shape)
            train, test = (checked_labels(file.read(f"{part}_labels"), f"{part}_labels") for part in _PARTS)
    except ValueError as error:
        raise _damaged(path, error, layout, numbers) from error
    return _counted(path, train, test, layout)


def _counted(path: Path, train: NDArray[np.int64], test: NDArray[np.int64], layout: Layout) -> int:
    """Return the highest label plus one; refuse labels up to it without a training sample."""
    count = 1 + max(int(train.max()), int(test.max()))
    if absent := first_absent(train, count):
        gaps = f"{absent[0]:,} of its labels 0 to {count - 1} have no training sample, the first is {absent[1]}"
        meant = f" ({KEY}.num_classes: {count} says that this is meant)" if count <= len(train) else ""
        raise _damaged(path, f"{gaps}{meant}", layout)
    return count


def read_arrays(
    path: Path, layout: Layout, convert: Callable[[NDArray[Any]], Tensor], numbers: bool = False
) -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file, with the training samples' clients if it has ``train_clients``.

    Args:
        path: the file.
        layout: what it holds.
        convert: makes ``[N, C, H, W]`` of an array of samples; may raise ValueError.
        numbers: whether labels are numbers to predict.

    Raises:
        DataFilesMissing: the file does not have the layout.
    """
    try:
        with opened_npz(path) as file:
            _claims(file, layout, numbers)
            checked = checked_numbers if numbers else checked_labels
            labels = {part: checked(file.read(f"{part}_labels"), f"{part}_labels") for part in _PARTS}
            clients = _client_numbers(file.read(CLIENTS), len(labels["train"])) if CLIENTS in file.keys else None
            samples = [convert(file.read(f"{part}_{layout.kind}")) for part in _PARTS]
    except ValueError as error:
        raise _damaged(path, error, layout, numbers) from error
    train, test = (torch.from_numpy(labels[part]) for part in _PARTS)
    return ImageSet(samples[0], train, clients), ImageSet(samples[1], test)


def _client_numbers(stored: NDArray[Any], samples: int) -> Tensor:
    """``[N]`` int64 from 0, in the order of the clients' names or numbers."""
    if stored.shape != (samples,) or stored.dtype.kind not in "iuUS":
        found = f"{stored.dtype} {list(stored.shape)}"
        raise ValueError(f"{CLIENTS} are {found}, not {samples} integers or names, one for each training sample")
    return torch.from_numpy(np.unique(stored, return_inverse=True)[1].astype(np.int64))


def read_npz(path: Path) -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file as described in :class:`Arrays`, channels last.

    Raises:
        DataFilesMissing: the file is not as described there.
    """
    return read_arrays(path, IMAGES, lambda stored: _channels_first(stored, "last"))


def _channels_first(stored: NDArray[Any], channels: str) -> Tensor:
    if stored.ndim == 3:
        stored = stored[:, None]
    elif channels == "last":
        stored = stored.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(stored))


class NpzSource(StandardSource):
    """A source that reads one ``.npz`` file of some layout. Sizes that are not given are read when first used.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: of one sample; None: as in the file.
        num_classes: number of classes; None: the highest label plus one.
        numbers: whether labels are numbers to predict.
        mean: see :class:`StandardSource`.
        std: likewise.
        max_train: likewise.
        max_test: likewise.

    Attributes:
        layout: layout of the file.
    """

    told_by: ClassVar[str | None] = "path"
    layout: ClassVar[Layout]

    def __init__(
        self,
        path: str,
        shape: tuple[int, int, int] | None,
        num_classes: int | None,
        mean: list[float] | None,
        std: list[float] | None,
        max_train: int | None,
        max_test: int | None,
        numbers: bool = False,
    ) -> None:
        check_numbers_alone(num_classes, numbers)
        self.targets = "numbers" if numbers else "classes"
        if not path:
            raise ConfigError(f"{KEY}.path", path, self.layout.about)
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        self.path = path
        self.name = Path(path).stem
        self._facts = known_of(self._key)
        self._given = shape is not None and num_classes is not None
        self.may_lack_classes = num_classes is not None
        if shape is not None:
            self.shape = shape
        if num_classes is not None:
            self.num_classes = num_classes
        super().__init__(mean, std, max_train, max_test)

    def sizes_known(self) -> bool:
        """Whether ``shape`` and ``num_classes`` were given; the file is not opened at construction."""
        return self._given

    @abstractmethod
    def _shape_of(self, stored: tuple[int, ...]) -> tuple[int, int, int]:
        """``(C, H, W)`` of an array of samples."""

    @abstractmethod
    def _convert(self, stored: NDArray[Any]) -> Tensor:
        """``[N, C, H, W]`` of an array of samples."""

    @property
    def _numbers(self) -> bool:
        return self.targets == "numbers"

    def _file(self, root: Path) -> Path:
        return root / Path(self.path).expanduser()

    def _existing_file(self, needed: str) -> Path:
        file = self._file(data_root())
        if not os.path.isfile(file):
            raise ConfigError(
                f"{KEY}.path",
                str(self.path),
                f"a file, or {KEY}.{needed} beside it: {file.absolute()} does not exist. "
                "An absolute path or CFL_DATA_ROOT names another place, and so does data.root of cfl fit",
            )
        return file

    def kept(self, root: Path) -> dict[str, dict[str, Any]]:
        """See :meth:`Source.kept`: sizes and names."""
        held = {"shape": list(self.shape), "num_classes": self.num_classes, "names": list(self.names(root))}
        return {self._key: held}

    @property
    def _key(self) -> str:
        """Text that identifies the file and how it is read, for checkpoints."""
        return f"{type(self).__name__} {self.path} {self.targets}"

    def __getattr__(self, name: str) -> Any:
        """Find ``shape``, ``num_classes``, ``mean`` and ``std`` on first use, if they were not given."""
        if name == "shape" and self._facts:
            self.shape = check_shape(self._facts["shape"])
        elif name == "num_classes" and self._facts:
            self.num_classes = int(self._facts["num_classes"])
        elif name == "shape":
            self.shape = self._shape_of(self._stored_shape(self._existing_file(name)))
        elif name == "num_classes":
            self.num_classes = self._stored_num_classes(self._existing_file(name))
        elif name == "mean":
            self.mean = (0.0,) * self.shape[0]
        elif name == "std":
            self.std = (1.0,) * self.shape[0]
        else:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.__dict__[name]

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set as stored."""
        file = self._file(root)
        if not os.path.isfile(file):
            raise DataFilesMissing(f"{file} is missing. Expected: {self.layout.about}. {where_else(self.path)}")
        train, test = self._stored_sets(file)
        channels, height, width = train.images.shape[1:]
        found = (channels, height, width)
        labels = [part.labels.numpy() for part in (train, test)]
        needed = labels[0].shape[1] if self._numbers else 1 + max(int(of_part.max()) for of_part in labels)
        if not self.may_lack_classes and not self._numbers:
            needed = _counted(file, labels[0], labels[1], self.layout)
        if "shape" not in self.__dict__:
            self.shape = found
        if "num_classes" not in self.__dict__:
            self.num_classes = needed
        if self._facts:
            outputs = self.num_classes if self.may_lack_classes else needed
            sizes, of_run = (list(found), outputs), (self._facts["shape"], self._facts["num_classes"])
            if sizes != of_run:
                valid = f"the file of the checkpoint's run, with shape and number of outputs {of_run}, not {sizes}"
                raise ConfigError(f"{KEY}.path", self.path, valid)
        if self.shape != found:
            raise ConfigError(*self._shape_option(self.shape, found, file))
        if needed != self.num_classes and not self.may_lack_classes:
            valid = f"{needed}, as {file} has labels; another told how many before data.root was known"
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, valid)
        if needed > self.num_classes:
            raise ConfigError(f"{KEY}.num_classes", self.num_classes, f"at least {needed}, see the labels in {file}")
        return train, test

    def _shape_option(
        self, given: tuple[int, ...], found: tuple[int, ...], file: Path
    ) -> tuple[str, list[int] | int, str]:
        """Key, value and what would be valid, for a shape that the file does not have."""
        return f"{KEY}.shape", list(given), f"{list(found)}, the shape stored in {file}"

    def names(self, root: Path) -> tuple[str, ...]:
        """Names of classes: those of the checkpoint's run, else ``class_names`` of the file, else numbers."""
        if self._facts:
            return tuple(self._facts["names"])
        file = self._file(root)
        return (os.path.isfile(file) and self._stored_names(file)) or super().names(root)

    # Reading the file; CsvTable does this in its own way.

    def _stored_shape(self, file: Path) -> tuple[int, ...]:
        """Shape of the array of training samples."""
        return stored_shape(file, self.layout, self._numbers)

    def _stored_num_classes(self, file: Path) -> int:
        """Number of classes, or of numbers that a label has."""
        return npz_num_classes(file, self.layout, self._numbers)

    def _stored_sets(self, file: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set."""
        return read_arrays(file, self.layout, self._convert, self._numbers)

    def _stored_names(self, file: Path) -> tuple[str, ...]:
        """Names of the classes, if the file has any."""
        try:
            with opened_npz(file) as held:
                found = held.read(NAMES) if NAMES in held.keys else None
        except ValueError as error:
            raise _damaged(file, error, self.layout) from error
        if found is None:
            return ()
        if found.shape != (self.num_classes,) or found.dtype.kind != "U":
            about = f"{NAMES} are {found.dtype} {list(found.shape)}, not {self.num_classes} texts"
            raise _damaged(file, about, self.layout)
        return tuple(map(str, found))


class Arrays(NpzSource):
    """Images of any kind from one ``.npz`` file, such as a subset of a larger data set.

    The file holds ``train_images`` and ``test_images``, uint8 ``[N, H, W]`` or ``[N, H, W, C]``, and
    ``train_labels`` and ``test_labels``, integers ``[N]`` from 0, or with ``numbers`` numbers ``[N]`` or ``[N, D]``. It
    may hold ``class_names``, texts ``[num_classes]``, and ``train_clients``, names or integers ``[N]``, for the
    partition ``Natural``. ``shape`` and ``num_classes`` that are not given are read from the file when first used.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: ``[C, H, W]`` of one image; null: as in the file.
        num_classes: number of classes, some of which may have no sample; null: the highest label plus one;
            every class must then have a training sample.
        channels: whether images with 4 dimensions are ``[N, H, W, C]`` (``last``) or ``[N, C, H, W]`` (``first``).
            Without ``shape``, ``last`` is refused if the first of the three numbers is 1 or 3 and the last is not.
        scale: stored value that means 1.0, positive.
        mean: subtracted per channel, in units of ``stored / scale``; null: 0.
        std: divided by per channel, in the same units, positive; null: 1.
        max_train: keep at most this many training samples, class-balanced, at least one of each; null: all.
        max_test: likewise for the test set.
        numbers: whether labels are numbers to predict, for ``data.scenario: regression``, instead of classes.

    Raises:
        ConfigError: a number that cannot work; or, when the file is read, its channels seem to come first.
    """

    layout = IMAGES

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
        numbers: bool = False,
    ) -> None:
        check_numbers(KEY, "(0, inf)", scale=scale)
        self.channels, self.scale = channels, scale
        given = None if shape is None else check_shape(shape)
        super().__init__(path, given, num_classes, mean, std, max_train, max_test, numbers)

    def _shape_of(self, stored: tuple[int, ...]) -> tuple[int, int, int]:
        if len(stored) == 3:
            return 1, stored[1], stored[2]
        if self.channels == "first":
            return stored[1], stored[2], stored[3]
        if stored[1] in MODES and stored[3] not in MODES:
            shape = [stored[3], stored[1], stored[2]]
            valid = f"first, as {self.path} has images {list(stored[1:])}, or {KEY}.shape: {shape} beside it"
            raise ConfigError(f"{KEY}.channels", self.channels, valid)
        return stored[3], stored[1], stored[2]

    @property
    def _key(self) -> str:
        return f"{super()._key} {self.channels}"

    def _stored_sets(self, file: Path) -> tuple[ImageSet, ImageSet]:
        if "shape" not in self.__dict__:
            self.shape = self._shape_of(self._stored_shape(file))
        return super()._stored_sets(file)

    def _convert(self, stored: NDArray[Any]) -> Tensor:
        return _channels_first(stored, self.channels)

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """See :meth:`Source.images_of_array`."""
        return images_of_array(stored, self.shape, self.channels)
