"""The base class of data sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from cfl.data.types import ImageSet, PixelTransform


class Source(ABC):
    """One data set. Everything except :meth:`load` is known without reading a file.

    Attributes:
        name: short lower-case name used in reports and run names.
        shape: ``(C, H, W)`` of the stored images.
        num_classes: number of classes.
        mean: per channel, of ``stored / scale``.
        std: per channel, of ``stored / scale``.
        scale: stored value that means 1.0.
        superclasses: the data set's own groups of classes, each ascending; none for most data sets.
        told_by: for classes that read many data sets, the option that names the data set.
        unlike_published: after loading, how the files differ from the published data set; empty if they do not, or if
            the published one is not known.
    """

    told_by: ClassVar[str | None] = None
    unlike_published: str = ""

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    superclasses: tuple[tuple[int, ...], ...] = ()

    @abstractmethod
    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, read from files under ``root``.

        Raises:
            cfl.runtime.errors.DataFilesMissing: naming each file that is expected, where, and how to get it.
        """

    def transform(self) -> PixelTransform:
        """The data set's own normalisation."""
        return PixelTransform(self.mean, self.std, self.scale)
