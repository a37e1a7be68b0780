"""Image files in one folder per class."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from cfl.data.sources.files import where_else
from cfl.data.sources.images import MODES, class_images, class_names, pixels_of, read_image
from cfl.data.sources.kept import known_of
from cfl.data.sources.labels import codes_of
from cfl.data.sources.root import data_root
from cfl.data.sources.standard import KEY, StandardSource, check_shape, nothing_at
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_choices, check_integers

if TYPE_CHECKING:
    from PIL import Image

Resize = Literal["stretch", "crop"]
_log = logging.getLogger(__name__)


def resized(image: Image.Image, shape: tuple[int, int, int], resize: Resize) -> Image.Image:
    """An image in the size of ``shape`` ``(C, H, W)``, scaled bilinearly with antialiasing if its size differs.

    Args:
        image: of any size.
        shape: to deliver.
        resize: ``stretch`` changes the proportions where those differ; ``crop`` keeps them and cuts the middle out.
    """
    from PIL import Image, ImageOps

    size = shape[2], shape[1]
    if image.size == size:
        return image
    if resize == "crop":
        return ImageOps.fit(image, size, Image.Resampling.BILINEAR)
    return image.resize(size, Image.Resampling.BILINEAR)


def read_class_folders(
    folder: Path, shape: tuple[int, int, int], skip_unreadable: bool = False, resize: Resize = "stretch"
) -> ImageSet:
    """Read ``<folder>/<class>/.../<image>``; labels follow the sorted names of the class folders.

    Images are converted to grey (C = 1) or RGB (C = 3), and brought to ``H x W`` by :func:`resized`. If all images lie
    in folders within the class folders, ``<folder>/<class>/<client>/.../<image>``, these inner folders are the clients
    that own the samples, numbered in the order of their names.

    Args:
        folder: holds one folder per class.
        shape: ``(C, H, W)`` to deliver, C 1 or 3.
        skip_unreadable: leave out files that are no images, with a warning, instead of stopping.
        resize: see :func:`resized`.

    Raises:
        DataFilesMissing: a folder without images, one that symbolic links lead to twice, or an unreadable image.
    """
    samples = class_images(folder)
    channels, height, width = shape
    images = np.empty((len(samples), height, width, channels), dtype=np.uint8)
    readable = np.ones(len(samples), dtype=bool)
    for i, (path, _) in enumerate(samples):
        try:
            image = read_image(path, MODES[channels])
        except DataFilesMissing:
            if not skip_unreadable:
                raise
            _log.warning("%s is not readable as an image and left out", path)
            readable[i] = False
            continue
        images[i] = np.asarray(resized(image, shape, resize)).reshape(height, width, channels)
    kept = np.ascontiguousarray(images[readable].transpose(0, 3, 1, 2))
    labels = np.array([label for _, label in samples], dtype=np.int64)[readable]
    clients, names = _clients(folder, samples)
    owners = None if clients is None else clients[torch.from_numpy(readable)]
    return ImageSet(torch.from_numpy(kept), torch.from_numpy(labels), owners, client_names=names)


def _clients(folder: Path, samples: list[tuple[Path, int]]) -> tuple[Tensor | None, tuple[str, ...]]:
    """``[N]`` int64 the client of every image, None without folders of clients; and the clients' names."""
    places = [path.relative_to(folder).parts for path, _ in samples]
    if any(len(place) < 3 for place in places):
        return None, ()
    return codes_of(np.array([place[1] for place in places]))


class ImageFolder(StandardSource):
    """Image files in ``<path>/train/<class>/`` and ``<path>/test/<class>/``; classes are numbered by name.

    With ``<path>/train/<class>/<client>/`` the partition ``Natural`` deals every client its own images; with
    ``<path>/test/<class>/<client>/`` a run also tells the accuracy at each client.

    Args:
        path: of the folder, relative to the data root or absolute.
        shape: ``[C, H, W]`` to deliver, C 1 (grey) or 3 (RGB); other images are converted and scaled.
        num_classes: number of class folders; null: counted when first used.
        resize: how images of another size are scaled. ``stretch``: to the whole of ``H x W``, which changes the
            proportions where those differ. ``crop``: with their proportions, and the middle is cut out.
        options: those of :class:`StandardSource`; ``mean`` is 0 and ``std`` 1 by default.

    Raises:
        ConfigError: a number that cannot work.
    """

    naming_option: ClassVar[str | None] = "path"

    def __init__(
        self,
        path: str,
        shape: list[int],
        num_classes: int | None = None,
        *,
        resize: Resize = "stretch",
        **options: Any,
    ) -> None:
        if not path:
            raise ConfigError(f"{KEY}.path", path, "a folder with train/<class>/ and test/<class>/")
        self.shape = check_shape(shape)
        check_choices(KEY, get_args(Resize), resize=resize)
        if self.shape[0] not in MODES:
            raise ConfigError(f"{KEY}.shape", shape, "[1, H, W] for grey or [3, H, W] for RGB images")
        check_integers(KEY, 1, or_null=True, num_classes=num_classes)
        self.path, self.resize = path, resize
        self.name = Path(path).name
        self._facts = known_of(self._key)
        self.mean, self.std = (0.0,) * self.shape[0], (1.0,) * self.shape[0]
        self.sizes_known = num_classes is not None
        if num_classes is not None:
            self.num_classes = num_classes
        super().__init__(**options)

    def __getattr__(self, name: str) -> Any:
        """Count ``num_classes`` on first use, if it was not given."""
        if name != "num_classes":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        folder = data_root() / Path(self.path).expanduser() / "train"
        if self._facts:
            self.num_classes = int(self._facts["num_classes"])
            return self.num_classes
        if not os.path.isdir(folder):
            raise nothing_at(folder, self.path, "a folder", ["num_classes"])
        self.num_classes = len(class_names(folder))
        return self.num_classes

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, every image decoded."""
        folder = root / Path(self.path).expanduser()
        missing = [str(folder / part) for part in ("train", "test") if not os.path.isdir(folder / part)]
        if missing:
            raise DataFilesMissing(
                f"{' and '.join(missing)}: missing. Expected: one folder of images per class in train and in test. "
                f"{where_else(self.path)}"
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
        train, test = (read_class_folders(folder / part, self.shape, resize=self.resize) for part in ("train", "test"))
        return train, test

    def facts_for_checkpoint(self, root: Path) -> dict[str, dict[str, Any]]:
        """See :meth:`Source.facts_for_checkpoint`."""
        return {self._key: {"num_classes": self.num_classes, "names": list(self.names(root))}}

    @property
    def _key(self) -> str:
        return f"{type(self).__name__} {self.path}"

    def names(self, root: Path) -> tuple[str, ...]:
        """Names of classes: those of the checkpoint's run, else of the class folders, else numbers."""
        if self._facts:
            return tuple(self._facts["names"])
        folder = root / Path(self.path).expanduser() / "train"
        found = tuple(class_names(folder)) if os.path.isdir(folder) else ()
        return found if len(found) == self.num_classes else super().names(root)

    @property
    def reads(self) -> str:
        """See :attr:`Source.reads`."""
        channels, height, width = self.shape
        how = {
            "stretch": f"scaled to {width} x {height} pixels, whatever their proportions",
            "crop": f"scaled with their proportions, and the middle of {width} x {height} pixels is cut out",
        }
        return f"Image files are converted to {MODES[channels]} and {how[self.resize]} (bilinear, with antialiasing)."

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.image_of_file`; the image may have any size and channels, as those of the folders."""
        return pixels_of(resized(read_image(path, MODES[self.shape[0]]), self.shape, self.resize))
