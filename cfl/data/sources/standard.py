"""The common base class of sources: normalisation, limits for quick runs, and checks of the loaded samples."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from cfl.data.sources.base import Source
from cfl.data.sources.labels import first_absent
from cfl.data.sources.split import balanced_subset
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.runtime.option_checks import check_integers

KEY = "data.stream.source"
_log = logging.getLogger(__name__)


def check_shape(shape: list[int]) -> tuple[int, int, int]:
    """``[C, H, W]`` as given in a config, all positive.

    Raises:
        ConfigError: for ``data.stream.source.shape``.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"{KEY}.shape", shape, "three positive integers [C, H, W]")
    channels, height, width = shape
    return channels, height, width


def check_numbers_alone(num_classes: int | None, numbers: bool) -> None:
    """Refuse a number of classes of a data set whose labels are numbers to predict.

    Raises:
        ConfigError: for ``data.stream.source.num_classes``.
    """
    if numbers and num_classes is not None:
        raise ConfigError(f"{KEY}.num_classes", num_classes, f"null with {KEY}.numbers: labels are no classes")


def nothing_at(place: Path, path: str, kind: str, sizes: Sequence[str] = ()) -> ConfigError:
    """The error for a path at which there is nothing, although it is read before ``data.root`` is known.

    Args:
        place: the path below the data root.
        path: as it was given.
        kind: what should be there, ``a file`` or ``a folder``.
        sizes: the options that tell what is read from there, if the class has such options.
    """
    where = "An absolute path or CFL_DATA_ROOT names another place, and so does data.root of cfl fit"
    options = " and ".join(f"{KEY}.{name}" for name in sizes)
    until = f". Until there is {kind}, {options} must be given" if sizes else ""
    return ConfigError(f"{KEY}.path", path, f"{kind}: {place.absolute()} does not exist. {where}{until}")


class StandardSource(Source):
    """A source with the common options. Subclasses set the fields of :class:`Source` and define :meth:`read`.

    Args:
        mean: subtracted per channel, in units of ``stored / scale`` (0 is black, 1 is white); null: the
            source's default.
        std: divided by per channel, in the same units, positive; null: the source's default.
        max_train: keep at most this many training samples, as many of each class as possible, at least one of each,
            or images with boxes that are evenly spaced in their order; the same ones in every run. null: all.
        max_test: likewise for the test set.

    Attributes:
        sizes_known: whether ``shape`` and ``num_classes`` are known at construction, as they are for fixed data sets.
        may_lack_classes: whether classes without a training sample are used, with a warning.
        tests_may_lack_classes: whether classes without a test sample are used, with a warning.
        published: number of training and test samples of the published set; files with other numbers are used, with a
            warning. None if it is not known.
        others: what to say about files that are not the data set's.

    Raises:
        ConfigError: a number that cannot work, or not one number per channel.
    """

    sizes_known = True
    may_lack_classes = False
    tests_may_lack_classes: ClassVar[bool] = True
    published: ClassVar[tuple[int, int] | None] = None
    others: ClassVar[str] = "these are not this data set's files"

    def __init__(
        self,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_train: int | None = None,
        max_test: int | None = None,
    ) -> None:
        if mean is not None:
            self.mean = tuple(mean)
        if std is not None:
            self.std = tuple(std)
        self.max_train, self.max_test = max_train, max_test
        if mean is not None and not all(map(math.isfinite, mean)):
            raise ConfigError(f"{KEY}.mean", mean, "finite numbers, one per channel")
        if std is not None and not all(math.isfinite(value) and value > 0 for value in std):
            raise ConfigError(f"{KEY}.std", std, "positive finite numbers, one per channel")
        check_integers(KEY, 1, or_null=True, max_train=max_train, max_test=max_test)
        if self.sizes_known:
            self._check_options_against_sizes()

    def _check_options_against_sizes(self) -> None:
        channels = self.shape[0]
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels:
                raise ConfigError(f"{KEY}.{name}", list(values), f"{channels} number(s), one per channel")
        for name, limit in (("max_train", self.max_train), ("max_test", self.max_test)):
            if limit is not None and self.targets == "classes" and limit < self.num_classes:
                raise ConfigError(
                    f"{KEY}.{name}", limit, f"at least {self.num_classes}, one sample of each class, or null for all"
                )

    @abstractmethod
    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """The whole training and test set, see :meth:`load`."""

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, limited to ``max_train`` and ``max_test`` samples.

        Args:
            root: folder of all data sets, see :func:`cfl.data.sources.root.data_root`.

        Raises:
            cfl.runtime.errors.DataFilesMissing: files are absent or damaged; the message names each and how to get it.
            cfl.runtime.errors.ConfigError: the options contradict the files.
        """
        train, test = self.read(Path(root))
        if self.published not in (None, (len(train), len(test))):
            self.unlike_published = (
                f"{type(self).__name__} has {len(train)} training and {len(test)} test samples; the published set "
                f"has {self.published[0]} and {self.published[1]}"
            )
            _log.warning("%s: under %s", self.unlike_published, root)
        self._check_options_against_sizes()
        for part, images in (("training", train), ("test", test)):
            self._check_content(part, images)
        return self._limit(train, self.max_train, "train"), self._limit(test, self.max_test, "test")

    def _check_content(self, part: str, read: ImageSet) -> None:
        if len(read) == 0:
            raise DataFilesMissing(f"{self.name}: the {part} set is empty")
        # For the user's own files there is nothing to compare with.
        others = f": {self.others}" if self.sizes_known else ""
        if tuple(read.images.shape[1:]) != tuple(self.shape):
            raise DataFilesMissing(
                f"{self.name}: the files hold {part} images of shape {list(read.images.shape[1:])}, "
                f"not {list(self.shape)}{others}"
            )
        if self.targets != "classes":
            return
        lowest, highest = int(read.labels.min()), int(read.labels.max())
        if lowest < 0 or highest >= self.num_classes:
            raise DataFilesMissing(
                f"{self.name}: the {part} labels run from {lowest} to {highest}, "
                f"outside 0..{self.num_classes - 1}{others}"
            )
        if absent := first_absent(read.labels, self.num_classes):
            said = f"{self.name}: {absent[0]} of {self.num_classes} classes have no {part} sample, first {absent[1]}"
            if not (self.may_lack_classes if part == "training" else self.tests_may_lack_classes):
                raise DataFilesMissing(f"{said}{others}")
            _log.warning("%s", said)

    def _limit(self, whole: ImageSet, limit: int | None, part: str) -> ImageSet:
        if limit is None or limit >= len(whole):
            return whole
        return whole.subset(balanced_subset(whole.groups, limit, f"source limit {self.name} {part}"))
