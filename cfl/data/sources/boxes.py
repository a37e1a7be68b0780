"""Images with boxes around objects: the common base class of data sets for detection."""

from __future__ import annotations

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cfl.data.sources.folder import resized
from cfl.data.sources.images import MODES, pixels_of, read_image
from cfl.data.sources.standard import KEY, StandardSource, check_shape
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers

_THINNEST = 1.0  # pixels
_log = logging.getLogger(__name__)


class Record(NamedTuple):
    """An image and its boxes, as a file describes them.

    Attributes:
        file: of the image.
        boxes: for each box the name of its class, and left, top, right and bottom in pixels of the image file.
        client: the client, from 0, that owns the image; None if unknown.
        seconds: how long the image lasts in a recording; None if unknown.
    """

    file: Path
    boxes: list[tuple[str, float, float, float, float]]
    client: int | None = None
    seconds: float | None = None


class DetectionSource(StandardSource):
    """A data set of images with boxes. Subclasses define :meth:`records`.

    Images are scaled to ``shape``, and boxes with them. Boxes are cut at the borders of their images. Boxes of other
    classes, and boxes that are then less than a pixel wide or high, are left out. Classes without a box in the
    training or test images are named in a warning. Images are stored as bytes. Those that ``max_train`` and
    ``max_test`` keep are evenly spaced in their order.

    Args:
        shape: ``[C, H, W]`` of the network's input, C 1 or 3.
        classes: names of the classes to find, in the order of their labels.
        most_boxes: most boxes of an image, at least 1; if an image has more, the largest are kept.
        options: those of :class:`StandardSource`; ``mean`` is 0.5 and ``std`` 0.25 by default.

    Raises:
        ConfigError: an option that cannot work; when the files are read, no training image has a box.
    """

    targets = "boxes"
    naming_option: ClassVar[str | None] = "path"

    def __init__(
        self,
        shape: list[int],
        classes: list[str],
        most_boxes: int = 64,
        **options: Any,
    ) -> None:
        self.shape = check_shape(shape)
        if self.shape[0] not in MODES:
            raise ConfigError(f"{KEY}.shape", shape, "1 or 3 channels")
        if not classes or len({*classes}) < len(classes):
            raise ConfigError(f"{KEY}.classes", classes, "at least one class, each once")
        check_integers(KEY, 1, at_most=10_000, most_boxes=most_boxes)
        self.class_names, self.num_classes, self.most_boxes = tuple(classes), len(classes), most_boxes
        self.mean, self.std = (0.5,) * self.shape[0], (0.25,) * self.shape[0]
        super().__init__(**options)

    @abstractmethod
    def records(self, root: Path) -> tuple[list[Record], list[Record]]:
        """Training and test images in their order, as files under ``root`` describe them.

        Raises:
            DataFilesMissing: naming the file that is absent or damaged.
        """

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, at most ``max_train`` and ``max_test`` images.

        Raises:
            DataFilesMissing: naming the file that is absent or damaged, or an image of both sets.
        """
        train, test = self.records(root)
        if shared := {*map(_identity, train)} & {*map(_identity, test)}:
            first = next(record.file for record in test if _identity(record) in shared)
            said = f"{self.name}: {len(shared)} images are for training and for tests, such as {first}"
            raise DataFilesMissing(f"{said}; expected: other images for tests")
        return self._whole("training", _spaced(train, self.max_train)), self._whole(
            "test", _spaced(test, self.max_test)
        )

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.image_of_file`; scaled to ``shape``."""
        return pixels_of(resized(read_image(path, MODES[self.shape[0]]), self.shape, "stretch"))

    def _whole(self, part: str, records: Sequence[Record]) -> ImageSet:
        if not records:
            raise DataFilesMissing(f"{self.name}: the {part} set is empty")
        images = torch.empty((len(records), *self.shape), dtype=torch.uint8)
        labels = torch.zeros((len(records), self.most_boxes, 5))
        labels[..., 0] = -1
        full = 0
        for number, record in enumerate(records):
            image = read_image(record.file, MODES[self.shape[0]])
            images[number] = pixels_of(resized(image, self.shape, "stretch"))
            found = self._scaled(record, image.width, image.height)
            full += len(found) > self.most_boxes
            found = found[: self.most_boxes]
            labels[number, : len(found)] = found
        if full:
            said = f"{self.name}: {full} {part} images have more than {self.most_boxes} boxes"
            _log.warning("%s, of which the largest are kept (%s.most_boxes)", said, KEY)
        self._check_classes(part, records, labels)
        clients, seconds = ([getattr(record, name) for record in records] for name in ("client", "seconds"))
        return ImageSet(
            images,
            labels,
            None if None in clients else torch.tensor(clients),
            None if None in seconds else torch.tensor(seconds, dtype=torch.float64),
        )

    def _check_classes(self, part: str, records: Sequence[Record], labels: Tensor) -> None:
        """Warn of classes without a box, and refuse training images without any box."""
        lacking = [name for number, name in enumerate(self.class_names) if not bool((labels[..., 0] == number).any())]
        if not lacking:
            return
        known = ", ".join(sorted({name for record in records for name, *_ in record.boxes})) or "no class"
        if part == "training" and len(lacking) == self.num_classes:
            valid = f"classes with a box of at least a pixel at {list(self.shape)}; the training images have boxes of"
            raise ConfigError(f"{KEY}.classes", list(self.class_names), f"{valid} {known}")
        said = "%s: no %s image has a box of %s of at least a pixel at %s; there are boxes of %s"
        _log.warning(said, self.name, part, ", ".join(lacking), list(self.shape), known)

    def _scaled(self, record: Record, width: int, height: int) -> Tensor:
        """The boxes of a record in pixels of ``shape``, ``[n, 5]``, the largest first."""
        rows = [(self.class_names.index(name), *corners) for name, *corners in record.boxes if name in self.class_names]
        boxes = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
        limits = torch.tensor([self.shape[2], self.shape[1]] * 2, dtype=torch.float64)
        given = torch.tensor([width, height] * 2, dtype=torch.float64)
        boxes[:, 1:] = (boxes[:, 1:] * limits / given).clamp(min=0).minimum(limits)
        sides = boxes[:, 3:] - boxes[:, 1:3]
        boxes, sides = boxes[(sides >= _THINNEST).all(1)], sides[(sides >= _THINNEST).all(1)]
        return boxes[sides.prod(1).argsort(descending=True, stable=True)].float()


def _identity(record: Record) -> Path | tuple[int, int]:
    """The same for an image that two paths lead to."""
    try:
        found = os.stat(record.file)
    except OSError:  # reading it will say so
        return record.file
    return found.st_dev, found.st_ino


def _spaced(records: list[Record], limit: int | None) -> list[Record]:
    if limit is None or limit >= len(records):
        return records
    return [records[k * len(records) // limit] for k in range(limit)]


def corners_of(values: Any, where: str, sized: bool = False) -> tuple[float, float, float, float]:
    """Left, top, right and bottom as finite numbers.

    Args:
        values: a list of four numbers, or of texts with numbers.
        where: file and place, for the message.
        sized: whether the last two are width and height.

    Raises:
        DataFilesMissing: the values are no four finite numbers, or right is left of left, or bottom above top.
    """
    try:
        left, top, right, bottom = (float(value) for value in (values if isinstance(values, list) else ()))
    except (TypeError, ValueError, OverflowError):
        raise DataFilesMissing(f"{where}: {values!r:.80} are no four numbers") from None
    if sized:
        right, bottom = left + right, top + bottom
    if not all(map(math.isfinite, (left, top, right, bottom))) or right < left or bottom < top:
        raise DataFilesMissing(f"{where}: {left:g}, {top:g}, {right:g}, {bottom:g} is no box")
    return left, top, right, bottom


def below(folder: Path, name: Any, where: str) -> Path:
    """Path of a file below a folder, from the name that another file gives.

    Raises:
        DataFilesMissing: the name leads out of the folder.
    """
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataFilesMissing(f"{where}: {name!r:.80} is no name of a file below {folder}")
    return folder / name


def entry(of: Any, key: str, where: str) -> Any:
    """An entry of an object that was read from a file.

    Raises:
        DataFilesMissing: there is no such entry.
    """
    if not isinstance(of, Mapping) or key not in of:
        raise DataFilesMissing(f"{where}: there is no {key}")
    return of[key]
