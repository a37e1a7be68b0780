"""Vectors of numbers stored as arrays in one ``.npz`` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.array_files import Layout
from cfl.data.sources.arrays import NpzSource
from cfl.data.sources.standard import KEY
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing
from cfl.runtime.option_checks import check_integers

_CHUNK = 65_536
FEATURES = Layout(
    "features",
    "an .npz file with train_features and test_features (floating-point numbers, [N, D]) and train_labels and "
    "test_labels (integers from 0, [N])",
    np.floating,
    (2,),
)


def feature_moments(features: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation ``[D]`` of every column of ``[N, D]``; a constant column has its value and 1."""
    # A constant column is treated apart: its rounded mean can differ from its value, and its deviation from 0.
    constant = features.min(0) == features.max(0)
    mean = np.where(constant, features[0], features.mean(0, dtype=np.float64))
    squares = np.zeros_like(mean)
    for start in range(0, len(features), _CHUNK):
        squares += np.square(features[start : start + _CHUNK] - mean).sum(0)
    deviation = np.sqrt(squares / len(features))
    return mean, np.where(constant, 1.0, deviation)


class Features(NpzSource):
    """Vectors of numbers, such as measurements or embeddings, from one ``.npz`` file.

    The file holds ``train_features`` and ``test_features``, floating-point ``[N, D]``, and ``train_labels`` and
    ``test_labels``, integers ``[N]`` from 0, or with ``numbers`` numbers ``[N]`` or ``[N, D]``. It may hold
    ``class_names``, ``train_clients`` and ``test_clients`` as for ``Arrays``. Networks get ``[N, 1, 1, D]``, which
    ``MLP`` takes.

    Args:
        path: of the file, relative to the data root or absolute.
        dimensions: D; null: as in the file.
        num_classes: number of classes, some of which may have no sample; null: the highest label plus one;
            every class must then have a training sample.
        standardise: subtract each feature's mean over the whole training set, and divide by its standard deviation
            (population), in training and test samples; of a feature that is constant in training, only the mean is
            subtracted. false: as stored.
        options: the others of :class:`NpzSource`, except ``mean`` and ``std``.

    Raises:
        ConfigError: a number that cannot work.
    """

    layout = FEATURES
    size_options: ClassVar[tuple[str, ...]] = ("dimensions", "num_classes")
    _tables = ""  # further kinds of files with such rows, for error messages
    scale = 1.0
    is_float = True
    mean = (0.0,)
    std = (1.0,)

    def __init__(
        self,
        path: str,
        dimensions: int | None = None,
        num_classes: int | None = None,
        standardise: bool = True,
        **options: Any,
    ) -> None:
        check_integers(KEY, 1, or_null=True, dimensions=dimensions)
        self.standardise = standardise
        self._moments: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
        shape = None if dimensions is None else (1, 1, dimensions)
        super().__init__(path, shape, num_classes, mean=None, std=None, **options)

    def _shape_of(self, stored: tuple[int, ...]) -> tuple[int, int, int]:
        return 1, 1, stored[1]

    def _convert(self, stored: NDArray[Any]) -> Tensor:
        """``[N, 1, 1, D]`` float32; the first array that is converted gives the moments."""
        if not np.isfinite(stored).all():
            raise ValueError("it holds NaN or infinity")
        if self.standardise:
            if self._moments is None:
                self._moments = feature_moments(stored)
            mean, deviation = self._moments
            found = np.empty(stored.shape, dtype=np.float32)
            for start in range(0, len(stored), _CHUNK):
                with np.errstate(over="ignore", invalid="ignore"):  # is refused below
                    found[start : start + _CHUNK] = (stored[start : start + _CHUNK] - mean) / deviation
        else:
            with np.errstate(over="ignore"):  # is refused below
                found = stored.astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError("it holds numbers that float32 cannot")
        return torch.from_numpy(found)[:, None, None]

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, standardised by the training set if ``standardise`` is set."""
        self._moments = self._moments_of_run()
        return super().read(root)

    def _shape_option(
        self, given: tuple[int, ...], found: tuple[int, ...], file: Path
    ) -> tuple[str, list[int] | int, str]:
        return f"{KEY}.dimensions", given[2], f"{found[2]}, the numbers per vector in {file}"

    # Features from outside the data set.

    @property
    def _key(self) -> str:
        return f"{super()._key} standardise={self.standardise}"

    def facts_for_checkpoint(self, root: Path) -> dict[str, dict[str, Any]]:
        """See :meth:`Source.facts_for_checkpoint`: also the moments."""
        return {
            key: {**held, "moments": self.moments(root)} for key, held in super().facts_for_checkpoint(root).items()
        }

    @property
    def reads(self) -> str:
        """See :attr:`Source.reads`."""
        said = "minus the training set's mean of the feature, over its standard deviation" * self.standardise
        return f"Features {said or 'as they are stored'}."

    def moments(self, root: Path) -> tuple[list[float], list[float]] | None:
        """See :meth:`Source.moments`; reads the file unless it has been read."""
        if not self.standardise:
            return None
        if self._moments is None:
            self._moments = self._moments_of_run()
        if self._moments is None:
            self.read(root)
        assert self._moments is not None
        return self._moments[0].tolist(), self._moments[1].tolist()

    def _moments_of_run(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Moments of the checkpoint's run; None for a new run, which computes them from the file."""
        if not self._facts or not self.standardise:
            return None
        mean, deviation = (np.array(values, dtype=np.float64) for values in self._facts["moments"])
        return mean, deviation

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.image_of_file`; refuses every file."""
        expected = f"{self._tables}.npy and .npz files with features [N, {self.shape[2]}]"
        raise DataFilesMissing(f"{path} cannot be used; expected: {expected}, as the run's data set holds them")

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """See :meth:`Source.images_of_array`; the array holds features ``[N, D]``."""
        if not np.issubdtype(stored.dtype, np.floating) or stored.shape[1:] != self.shape[2:]:
            raise ValueError(f"it is {stored.dtype} {list(stored.shape)}, not floating-point [N, {self.shape[2]}]")
        self.moments(root)
        return self._convert(stored)
