"""The base class of data sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray
from torch import Tensor

from cfl.data.named import Named
from cfl.data.sources.images import images_of_array, stored_image
from cfl.data.types import ImageSet, PixelTransform
from cfl.metrics.base import Targets
from cfl.runtime.errors import DataFilesMissing


class Source(Named, ABC):
    """One data set. Everything except :meth:`load` is known without reading a file.

    Attributes:
        name: short lower-case name used in reports and run names; by default the class's name.
        shape: ``(C, H, W)`` of the stored images.
        num_classes: number of classes, or number D of values to predict.
        targets: kind of the labels: ``classes``, ``numbers`` to predict ``[N, D]``, or ``boxes`` ``[N, M, 5]``.
        mean: per channel, of ``stored / scale``.
        std: per channel, of ``stored / scale``.
        scale: stored value that means 1.0.
        is_float: whether stored values are floating-point numbers instead of integers from 0 to ``scale``.
        superclasses: the data set's own groups of classes, each ascending; none for most data sets.
        class_names: names of all classes, in the order of their labels; empty if there are none, or only in files.
        naming_option: for classes that read many data sets, the option that names the data set.
        unlike_published: after loading, how the files differ from the published data set; empty if they do not, or if
            the published one is not known.
    """

    naming_option: ClassVar[str | None] = None
    unlike_published: str = ""

    shape: tuple[int, int, int]
    num_classes: int
    targets: Targets = "classes"
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    is_float: bool = False
    superclasses: tuple[tuple[int, ...], ...] = ()
    class_names: tuple[str, ...] = ()

    def facts_for_checkpoint(self, root: Path) -> dict[str, dict[str, Any]]:
        """Data set -> facts that were read from files, such as sizes, for checkpoints; empty for most data sets."""
        return {}

    @property
    def holds_rows(self) -> bool:
        """Whether samples are rows of numbers, ``[1, 1, D]``, instead of images."""
        return self.shape[:2] == (1, 1)

    @property
    def reads(self) -> str:
        """How image files from outside the data set are read, in sentences; empty if they must have its format."""
        return ""

    def moments(self, root: Path) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of every feature by which :meth:`load` standardises them; None if it does not."""
        return None

    @abstractmethod
    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, read from files under ``root``.

        Raises:
            cfl.runtime.errors.DataFilesMissing: naming each file that is expected, where, and how to get it.
        """

    def transform(self) -> PixelTransform:
        """The data set's own normalisation."""
        return PixelTransform(self.mean, self.std, self.scale)

    def names(self, root: Path) -> tuple[str, ...]:
        """Names of all classes, from the data set's class or files under ``root``; else their numbers.

        If labels are numbers, these are names of the D outputs."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def columns(self, root: Path) -> tuple[str, ...]:
        """Names of the features, in their order; empty if they have none."""
        return ()

    def task_names(self, root: Path) -> tuple[str, ...]:
        """Names of the tasks of which the data set says its samples are, in their order; empty if it does not say."""
        return ()

    # Images from outside the data set.

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """``[C, H, W]``: an image file as :meth:`load` would deliver it.

        Args:
            path: of the file, with white at 255. A grey image is repeated over the channels.
            root: folder with the data sets' files.

        Raises:
            cfl.runtime.errors.DataFilesMissing: naming the file, if it is no image, or one of another size or with
                more channels, or if stored values are floating-point numbers, which image files do not hold.
        """
        if self.is_float:
            expected = f".npy and .npz files with floating-point arrays [N, ...] like {list(self.shape)}"
            raise DataFilesMissing(f"{path} cannot be used; expected: {expected}")
        return stored_image(path, self.shape, self.scale)

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """``[N, C, H, W]``: images of an array as :meth:`load` would deliver them.

        Args:
            stored: ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``; uint8, or floating-point if ``is_float`` is
                set.
            root: folder with the data sets' files.

        Raises:
            ValueError: an array of another type or shape; the message says which would be valid.
        """
        return images_of_array(stored, self.shape, is_float=self.is_float)

    def images_of_table(self, path: Path, root: Path) -> Tensor:
        """``[N, C, H, W]``: rows of a CSV file as :meth:`load` would deliver them, for ``CsvTable`` only.

        Args:
            path: of the file.
            root: folder with the data sets' files.

        Raises:
            cfl.runtime.errors.DataFilesMissing: naming the file and what would be valid.
        """
        raise DataFilesMissing(
            f"{path} cannot be used: only runs on CsvTable read tables, and this run's data set is another"
        )
