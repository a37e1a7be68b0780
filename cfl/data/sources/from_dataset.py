"""Data sets of other packages: torch's map-style ``Dataset``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from cfl.data.sources.images import MODES, pixels_of, read_image
from cfl.data.sources.labels import checked_numbers
from cfl.data.sources.standard import KEY, StandardSource, check_numbers_alone
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing, reason
from cfl.runtime.option_checks import check_integers, check_numbers

_READ_TWICE = 8


class FromDataset(StandardSource):
    """Any map-style ``torch.utils.data.Dataset`` whose samples are ``(image, label)``.

    In a configuration ``train`` and ``test`` are classes with their options, such as ``torchvision.datasets.STL10``. In
    Python they are objects. Samples are read once, before training.

    An image is a picture of Pillow's, or uint8 or floating-point: ``[C, H, W]`` (torch), ``[H, W, C]`` (numpy),
    ``[H, W]``, or ``[D]``, which becomes ``[1, 1, D]``. All images have the same shape and type. A label is an integer
    from 0. With ``numbers`` it is a number to predict or a vector of numbers, of the same length for every sample.
    Names of classes are taken from an attribute ``classes``. A random transform is refused: ``data.augmentation``
    changes images.

    Args:
        train: the training set; in Python the object, or a function that makes it.
        test: the test set.
        num_classes: number of classes, some of which may have no sample; null: the length of ``classes``, or the
            highest label plus one.
        scale: value that means 1.0, positive; null: 255 for bytes, 1 for floating-point images.
        numbers: whether labels are numbers to predict, for ``data.scenario: regression``, instead of classes.
        options: those of :class:`StandardSource`; ``mean`` is 0 and ``std`` 1 by default.

    Raises:
        ConfigError: a data set without length or items, or a number that cannot work.
        DataFilesMissing: a data set cannot be made, or its first sample cannot be used.
    """

    naming_option: ClassVar[str | None] = "train"
    sizes_known = False  # from the samples only

    def __init__(
        self,
        train: Callable[[], Dataset] | Dataset,
        test: Callable[[], Dataset] | Dataset,
        num_classes: int | None = None,
        scale: float | None = None,
        *,
        numbers: bool = False,
        **options: Any,
    ) -> None:
        check_numbers_alone(num_classes, numbers)
        self.targets = "numbers" if numbers else "classes"
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        check_numbers(KEY, "(0, inf)", or_null=True, scale=scale)
        self.train, self.test = _made(train, "train"), _made(test, "test")
        self.name = type(self.train).__name__.lower()
        first, label = _sample(self.train, "train", 0, numbers)
        self._label = label
        channels, height, width = first.shape
        self.shape, self._dtype = (channels, height, width), first.dtype
        self.is_float = first.is_floating_point()
        self.scale = (1.0 if self.is_float else 255.0) if scale is None else scale
        self.mean, self.std = (0.0,) * channels, (1.0,) * channels
        self.class_names = _names(self.train)
        self.may_lack_classes = num_classes is not None
        if numbers:
            self.num_classes = len(label)
        elif num_classes is not None or self.class_names:
            self.num_classes = num_classes or len(self.class_names)
        if len(self.class_names) != self.__dict__.get("num_classes"):
            self.class_names = ()
        self._read: tuple[ImageSet, ImageSet] | None = None
        super().__init__(**options)

    def __getattr__(self, name: str) -> Any:
        """Count ``num_classes`` on first use, if neither the option nor the data set gives it."""
        if name != "num_classes":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._read = self._both()
        self.num_classes = 1 + max(int(part.labels.max()) for part in self._read)
        return self.num_classes

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, every sample read; ``root`` is not used."""
        found, self._read = self._read or self._both(), None
        return found

    def _both(self) -> tuple[ImageSet, ImageSet]:
        return self._whole("train", self.train), self._whole("test", self.test)

    def _whole(self, part: str, dataset: Any) -> ImageSet:
        images = torch.empty((len(dataset), *self.shape), dtype=self._dtype)
        labels = self._label.new_empty((len(dataset), *self._label.shape))
        for index in range(len(dataset)):
            image, label = _sample(dataset, part, index, self.targets == "numbers")
            if label.shape != self._label.shape:
                found = (
                    f"{part}[{index}] has {len(label)} numbers to predict, the first training sample {self.num_classes}"
                )
                raise DataFilesMissing(f"{self.name}: {found}")
            images[index], labels[index] = self._like_the_first(image, f"{part}[{index}]"), label
        for index in range(0, len(dataset), -(-len(dataset) // _READ_TWICE)):
            if not torch.equal(_sample(dataset, part, index, self.targets == "numbers")[0], images[index]):
                value = f"{type(dataset).__name__}, whose sample {index} is another one when it is read again"
                raise ConfigError(f"{KEY}.{part}", value, "a Dataset without random transforms; see data.augmentation")
        return ImageSet(images, self._numbers_of(part, labels) if self.targets == "numbers" else labels)

    def _numbers_of(self, part: str, labels: Tensor) -> Tensor:
        """``[N, D]`` float32 of the float64 numbers to predict."""
        try:
            return torch.from_numpy(checked_numbers(labels.numpy(), f"the labels of {part}"))
        except ValueError as error:
            raise DataFilesMissing(f"{self.name}: {error}") from error

    def _like_the_first(self, image: Tensor, name: str) -> Tensor:
        if image.shape != self.shape or image.dtype != self._dtype:
            found, first = f"{image.dtype} {list(image.shape)}", f"{self._dtype} {list(self.shape)}"
            raise DataFilesMissing(f"{self.name}: {name} is {found}, the first training image {first}")
        return image

    # Images from outside the data set.

    @property
    def reads(self) -> str:
        """See :attr:`Source.reads`."""
        return "Image files go through the transform of the training set." if self._transform is not None else ""

    @property
    def _transform(self) -> Any:
        found = getattr(self.train, "transform", None)
        return found if callable(found) else None

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.image_of_file`; through the training set's ``transform``, as torchvision calls it."""
        if self._transform is None:
            return super().image_of_file(path, root)
        image = read_image(path, MODES.get(self.shape[0], MODES[3]))
        try:
            found = _image(self._transform(image))
        except Exception as error:  # from code outside this package
            raise DataFilesMissing(f"{path} cannot be transformed: {reason(error)}") from error
        return self._like_the_first(found, str(path))

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """See :meth:`Source.images_of_array`; rows are images as for the class, or ``[C, H, W]``."""
        found = [_image(torch.from_numpy(np.array(row)) if row.shape == self.shape else row) for row in stored]
        if any(image.shape != self.shape or image.dtype != self._dtype for image in found):
            expected = f"images that become {self._dtype} {list(self.shape)}"
            raise ValueError(f"it is {stored.dtype} {list(stored.shape)}, not {expected}")
        return torch.stack(found) if found else torch.empty((0, *self.shape), dtype=self._dtype)


def _made(given: Any, part: str) -> Any:
    """Return the data set, made if a function was given; refuse one that is not map-style or is empty."""
    dataset = given
    if not hasattr(given, "__getitem__") and callable(given):
        try:
            dataset = given()
        except Exception as error:  # from code outside this package
            raise DataFilesMissing(f"{KEY}.{part} cannot be used: {reason(error)}") from error
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{KEY}.{part}", name, "a map-style Dataset, with __len__ and __getitem__")
    if not len(dataset):
        raise ConfigError(f"{KEY}.{part}", name, "a Dataset with samples; this one is empty")
    return dataset


def _names(dataset: Any) -> tuple[str, ...]:
    found = getattr(dataset, "classes", None)
    is_names = isinstance(found, list | tuple) and all(isinstance(name, str) for name in found)
    return tuple(found) if is_names and found else ()


def _sample(dataset: Any, part: str, index: int, numbers: bool) -> tuple[Tensor, Tensor]:
    """One sample: ``[C, H, W]`` uint8 or float32, and its label, ``[]`` int64 or ``[D]`` float64."""
    try:
        sample = dataset[index]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(f"it is a {type(sample).__name__}, not a pair (image, label)")
        image, label = sample
        return _image(image), _numbers(label) if numbers else _class(label)
    except Exception as error:  # from code outside this package
        name = type(dataset).__name__
        raise DataFilesMissing(f"{KEY}.{part}: {name}[{index}] cannot be used: {reason(error)}") from error


def _class(label: Any) -> Tensor:
    number = np.asarray(label)
    if number.dtype.kind not in "iu" or number.size != 1 or not 0 <= int(number.item()) < 2**31:
        raise ValueError(f"its label is {label!r:.80}, not an integer from 0")
    return torch.tensor(int(number.item()))


def _numbers(label: Any) -> Tensor:
    found = np.asarray(label)
    if found.dtype.kind not in "iuf" or found.ndim > 1 or not found.size or not np.isfinite(found).all():
        raise ValueError(f"its label is {label!r:.80}, not a finite number or a vector of them")
    return torch.from_numpy(found.astype(np.float64).reshape(-1))


def _image(image: Any) -> Tensor:
    """Convert an image of a data set to ``[C, H, W]`` uint8 or float32."""
    if hasattr(image, "getbands"):  # a picture of Pillow's
        if image.mode not in MODES.values():
            raise ValueError(f"its picture has Pillow's mode {image.mode}, not {' or '.join(MODES.values())}")
        return pixels_of(image)
    if isinstance(image, np.ndarray):
        if image.ndim == 3 and image.shape[0] in MODES and image.shape[2] not in MODES:
            found = (
                f"its image is an array {list(image.shape)}, not [H, W, C] with {' or '.join(map(str, MODES))} channels"
            )
            raise ValueError(f"{found}; an image [C, H, W] has to be a tensor")
        stored = torch.from_numpy(np.array(image.transpose(2, 0, 1) if image.ndim == 3 else image, order="C"))
    elif isinstance(image, Tensor):
        stored = image
    else:
        raise ValueError(f"its image is a {type(image).__name__}, not a picture of Pillow's, an array or a tensor")
    if not 1 <= stored.ndim <= 3 or not (stored.dtype == torch.uint8 or stored.is_floating_point()):
        raise ValueError(f"its image is {stored.dtype} {list(stored.shape)}, not uint8 or floating-point [C, H, W]")
    stored = stored.reshape((1,) * (3 - stored.ndim) + tuple(stored.shape))
    if stored.is_floating_point():
        stored = stored.float()
        if not stored.isfinite().all():
            raise ValueError("its image holds NaN or infinity")
    return stored.detach().clone()
