"""Images stored as arrays in one ``.npz`` file."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.array_files import (
    IMAGES,
    Layout,
    channels_first,
    count_classes,
    read_arrays,
    stored_names,
    stored_num_classes,
    stored_shape,
)
from cfl.data.sources.files import where_else
from cfl.data.sources.images import MODES, images_of_array
from cfl.data.sources.kept import known_of
from cfl.data.sources.root import data_root
from cfl.data.sources.standard import KEY, StandardSource, check_numbers_alone, check_shape, nothing_at
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers, check_numbers


class NpzSource(StandardSource):
    """A source that reads one ``.npz`` file of some layout. Sizes that are not given are read when first used.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: of one sample; None: as in the file.
        num_classes: number of classes; None: the highest label plus one.
        numbers: whether labels are numbers to predict, for ``data.scenario: regression``, instead of classes.
        options: those of :class:`StandardSource`.

    Attributes:
        layout: layout of the file.
        size_options: the options that tell shape and number of classes where there is no file yet, if it has both.
    """

    naming_option: ClassVar[str | None] = "path"
    size_options: ClassVar[tuple[str, ...]] = ()
    layout: Layout

    def __init__(
        self,
        path: str,
        shape: tuple[int, int, int] | None,
        num_classes: int | None = None,
        numbers: bool = False,
        **options: Any,
    ) -> None:
        check_numbers_alone(num_classes, numbers)
        if numbers:
            self.targets, self.layout = "numbers", self.layout.of_numbers()
        if not path:
            raise ConfigError(f"{KEY}.path", path, self.layout.about)
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        self.path = path
        self.name = Path(path).stem
        self._facts = known_of(self._key)
        self.sizes_known = shape is not None and num_classes is not None
        self.may_lack_classes = num_classes is not None
        if shape is not None:
            self.shape = shape
        if num_classes is not None:
            self.num_classes = num_classes
        super().__init__(**options)

    @abstractmethod
    def _shape_of(self, stored: tuple[int, ...]) -> tuple[int, int, int]:
        """``(C, H, W)`` of an array of samples."""

    @abstractmethod
    def _convert(self, stored: NDArray[Any]) -> Tensor:
        """``[N, C, H, W]`` of an array of samples."""

    def _file(self, root: Path) -> Path:
        return root / Path(self.path).expanduser()

    def _existing_file(self) -> Path:
        file = self._file(data_root())
        if not os.path.isfile(file):
            # With numbers no option tells how many a label has.
            raise nothing_at(file, self.path, "a file", () if self.layout.numbers else self.size_options)
        return file

    def facts_for_checkpoint(self, root: Path) -> dict[str, dict[str, Any]]:
        """See :meth:`Source.facts_for_checkpoint`: sizes and names."""
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
            self.shape = self._shape_of(self._stored_shape(self._existing_file()))
        elif name == "num_classes":
            self.num_classes = self._stored_num_classes(self._existing_file())
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
        if self.layout.numbers:
            needed = labels[0].shape[1]
        elif self.may_lack_classes:
            needed = 1 + max(int(of_part.max()) for of_part in labels)
        else:
            needed = count_classes(file, labels[0], labels[1], self.layout)
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
        return stored_shape(file, self.layout)

    def _stored_num_classes(self, file: Path) -> int:
        """Number of classes, or of numbers that a label has."""
        return stored_num_classes(file, self.layout)

    def _stored_sets(self, file: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set."""
        return read_arrays(file, self.layout, self._convert)

    def _stored_names(self, file: Path) -> tuple[str, ...]:
        """Names of the classes, if the file has any."""
        return stored_names(file, self.layout, self.num_classes)


class Arrays(NpzSource):
    """Images of any kind from one ``.npz`` file, such as a subset of a larger data set.

    The file holds ``train_images`` and ``test_images``, uint8 ``[N, H, W]`` or ``[N, H, W, C]``, and
    ``train_labels`` and ``test_labels``, integers ``[N]`` from 0, or with ``numbers`` numbers ``[N]`` or ``[N, D]``. It
    may hold ``class_names``, texts ``[num_classes]``, and ``train_clients``, names or integers ``[N]``, for the
    partition ``Natural``, with ``test_clients`` also for the accuracy at each client. ``shape`` and ``num_classes``
    that are not given are read from the file when first used.

    Args:
        path: of the file, relative to the data root or absolute.
        shape: ``[C, H, W]`` of one image; null: as in the file.
        num_classes: number of classes, some of which may have no sample; null: the highest label plus one;
            every class must then have a training sample.
        channels: whether images with 4 dimensions are ``[N, H, W, C]`` (``last``) or ``[N, C, H, W]`` (``first``).
            Without ``shape``, ``last`` is refused if the first of the three numbers is 1 or 3 and the last is not.
        scale: stored value that means 1.0, positive.
        options: the others of :class:`NpzSource`; ``mean`` is 0 and ``std`` 1 by default.

    Raises:
        ConfigError: a number that cannot work; or, when the file is read, its channels seem to come first.
    """

    layout = IMAGES
    size_options = ("shape", "num_classes")

    def __init__(
        self,
        path: str,
        shape: list[int] | None = None,
        num_classes: int | None = None,
        channels: Literal["last", "first"] = "last",
        scale: float = 255.0,
        **options: Any,
    ) -> None:
        check_numbers(KEY, "(0, inf)", scale=scale)
        self.channels, self.scale = channels, scale
        given = None if shape is None else check_shape(shape)
        super().__init__(path, given, num_classes, **options)

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
        return channels_first(stored, self.channels)

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """See :meth:`Source.images_of_array`."""
        return images_of_array(stored, self.shape, self.channels)
