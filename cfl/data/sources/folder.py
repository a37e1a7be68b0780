"""Image files in one folder per class."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cfl.data.sources.files import where_else
from cfl.data.sources.images import class_images, class_names, read_image
from cfl.data.sources.root import data_root
from cfl.data.sources.standard import KEY, StandardSource, check_shape
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers

_log = logging.getLogger(__name__)
_MODES = {1: "L", 3: "RGB"}


def read_class_folders(folder: Path, shape: tuple[int, int, int], skip_unreadable: bool = False) -> ImageSet:
    """Read ``<folder>/<class>/.../<image>``; labels follow the sorted names of the class folders.

    Images are converted to grey (C = 1) or RGB (C = 3); those of another size are scaled to ``H x W``
    (bilinear with antialiasing), which changes the proportions where those differ.

    Args:
        folder: holds one folder per class.
        shape: ``(C, H, W)`` to deliver, C 1 or 3.
        skip_unreadable: leave out files that are no images, with a warning, instead of stopping.

    Raises:
        DataFilesMissing: a folder without images, one that symbolic links lead to twice, or an unreadable image.
    """
    from PIL import Image

    samples = class_images(folder)
    channels, height, width = shape
    images = np.empty((len(samples), height, width, channels), dtype=np.uint8)
    readable = np.ones(len(samples), dtype=bool)
    for i, (path, _) in enumerate(samples):
        try:
            image = read_image(path, _MODES[channels])
        except DataFilesMissing:
            if not skip_unreadable:
                raise
            _log.warning("%s is not readable as an image and left out", path)
            readable[i] = False
            continue
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        images[i] = np.asarray(image).reshape(height, width, channels)
    kept = np.ascontiguousarray(images[readable].transpose(0, 3, 1, 2))
    labels = np.array([label for _, label in samples], dtype=np.int64)[readable]
    return ImageSet(torch.from_numpy(kept), torch.from_numpy(labels))


class ImageFolder(StandardSource):
    """Image files in ``<folder>/train/<class>/`` and ``<folder>/test/<class>/``; classes are numbered by name.

    Args:
        folder: relative to the data root or absolute.
        shape: ``[C, H, W]`` to deliver, C 1 (grey) or 3 (RGB); other images are converted and scaled.
        num_classes: number of class folders; null: counted when first asked for.
        mean: subtracted per channel, in units of ``stored / 255``; null: 0.
        std: divided by per channel, in the same units, positive; null: 1.
        max_train: keep at most this many training samples, class-balanced, at least one of each; null: all.
        max_test: likewise for the test set.

    Raises:
        ConfigError: a number that cannot work.
    """

    told_by: ClassVar[str | None] = "folder"

    def __init__(
        self,
        folder: str,
        shape: list[int],
        num_classes: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_train: int | None = None,
        max_test: int | None = None,
    ) -> None:
        if not folder:
            raise ConfigError(f"{KEY}.folder", folder, "a folder with train/<class>/ and test/<class>/")
        self.shape = check_shape(shape)
        if self.shape[0] not in _MODES:
            raise ConfigError(f"{KEY}.shape", shape, "[1, H, W] for grey or [3, H, W] for RGB images")
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        self.folder = folder
        self.name = Path(folder).name
        self.mean, self.std = (0.0,) * self.shape[0], (1.0,) * self.shape[0]
        self._given = num_classes is not None
        if num_classes is not None:
            self.num_classes = num_classes
        super().__init__(mean, std, max_train, max_test)

    def sizes_known(self) -> bool:
        """Whether the number of classes was given; folders are not listed at construction."""
        return self._given

    def __getattr__(self, name: str) -> Any:
        """Count ``num_classes`` on first use, if it was not given."""
        if name != "num_classes":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        folder = data_root() / Path(self.folder).expanduser() / "train"
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{KEY}.num_classes",
                None,
                f"a value, or a folder to count in: {folder.absolute()} does not exist. "
                "An absolute path or CFL_DATA_ROOT names another place, and so does data.root of cfl fit",
            )
        self.num_classes = len(class_names(folder))
        return self.num_classes

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Both sets, every image decoded."""
        folder = root / Path(self.folder).expanduser()
        missing = [str(folder / part) for part in ("train", "test") if not os.path.isdir(folder / part)]
        if missing:
            raise DataFilesMissing(
                f"{' and '.join(missing)}: missing. Expected: one folder of images per class in each. "
                f"{where_else(self.folder)}"
            )
        if os.path.samefile(folder / "train", folder / "test"):
            raise DataFilesMissing(f"{folder}: train and test are the same folder; expected: other images for tests")
        train_classes, test_classes = class_names(folder / "train"), class_names(folder / "test")
        if train_classes != test_classes:
            differing = sorted(set(train_classes) ^ set(test_classes))
            raise DataFilesMissing(f"{folder}: train and test must have the same classes; in one only: {differing}")
        if "num_classes" not in self.__dict__:
            self.num_classes = len(train_classes)
        if self.num_classes != len(train_classes):
            raise ConfigError(
                f"{KEY}.num_classes", self.num_classes, f"{len(train_classes)}, the number of folders in {folder}/train"
            )
        return read_class_folders(folder / "train", self.shape), read_class_folders(folder / "test", self.shape)
