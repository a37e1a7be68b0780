"""Reads samples and labels from the arrays of one ``.npz`` file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.labels import checked_labels, checked_numbers, codes_of, first_absent
from cfl.data.sources.npz import Claim, NpzFile, opened_npz
from cfl.data.sources.standard import KEY
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing

_PARTS = ("train", "test")
CLIENTS, NAMES = {part: f"{part}_clients" for part in _PARTS}, "class_names"
"""Names of optional arrays of a file."""


class Layout(NamedTuple):
    """The names, types and dimensions of the arrays of a file.

    Attributes:
        kind: kind of the samples, whose arrays are named ``train_<kind>`` and ``test_<kind>``.
        about: description of the whole file, for messages.
        values: numpy's type of the samples' values.
        dimensions: numbers of dimensions that the arrays of samples may have.
        numbers: whether labels are numbers to predict, instead of classes.
    """

    kind: str
    about: str
    values: type[np.generic]
    dimensions: tuple[int, ...]
    numbers: bool = False

    def of_numbers(self) -> Layout:
        """The same layout with numbers to predict as labels."""
        about = self.about.replace("integers from 0, [N]", "numbers, [N] or [N, D]")
        return self._replace(about=about, numbers=True)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays that a file must have."""
        return tuple(f"{part}_{kind}" for part in _PARTS for kind in (self.kind, "labels"))


IMAGES = Layout(
    "images",
    "an .npz file with train_images and test_images (unsigned bytes, [N, H, W] or [N, H, W, C]) and train_labels "
    "and test_labels (integers from 0, [N])",
    np.uint8,
    (3, 4),
)


def _damaged(path: Path, reason: object, layout: Layout) -> DataFilesMissing:
    return DataFilesMissing(f"{path} cannot be used: {reason}. Expected: {layout.about}.")


@contextmanager
def _opened(path: Path, layout: Layout) -> Iterator[NpzFile]:
    """As :func:`opened_npz`; what is wrong with the file is raised as DataFilesMissing."""
    try:
        with opened_npz(path) as file:
            yield file
    except ValueError as error:
        raise _damaged(path, error, layout) from error


def _claims(file: NpzFile, layout: Layout) -> dict[str, Claim]:
    """Return the headers of all four arrays after checking that they fit together."""
    if lacking := sorted(set(layout.keys) - set(file.keys)):
        raise ValueError(f"it lacks {', '.join(lacking)}")
    found, kind, numbers = {key: file.claim(key) for key in layout.keys}, layout.kind, layout.numbers
    for part in _PARTS:
        samples, labels = found[f"{part}_{kind}"], found[f"{part}_labels"]
        if not np.issubdtype(samples.dtype, layout.values) or labels.dtype.kind not in ("iuf" if numbers else "iu"):
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


def stored_shape(path: Path, layout: Layout) -> tuple[int, ...]:
    """Shape of the array of training samples, from its header alone.

    Raises:
        DataFilesMissing: the file does not have the layout.
    """
    with _opened(path, layout) as file:
        return _claims(file, layout)[f"train_{layout.kind}"].shape


def stored_num_classes(path: Path, layout: Layout) -> int:
    """Highest label of both sets plus one, or how many numbers a label has, without reading the samples.

    Raises:
        DataFilesMissing: the file does not have the layout, or a label in between has no training sample.
    """
    with _opened(path, layout) as file:
        found = _claims(file, layout)
        if layout.numbers:
            return _width(found["train_labels"].shape)
        train, test = (checked_labels(file.read(f"{part}_labels"), f"{part}_labels") for part in _PARTS)
    return count_classes(path, train, test, layout)


def count_classes(path: Path, train: NDArray[np.int64], test: NDArray[np.int64], layout: Layout) -> int:
    """Return the highest label plus one.

    Raises:
        DataFilesMissing: a label up to it has no training sample.
    """
    count = 1 + max(int(train.max()), int(test.max()))
    if absent := first_absent(train, count):
        gaps = f"{absent[0]:,} of its labels 0 to {count - 1} have no training sample, the first is {absent[1]}"
        if count > 1 + int(train.max()):
            gaps += f", and {count - 1} is a label of tests alone"
        meant = f" ({KEY}.num_classes: {count} says that this is meant)" if count <= len(train) else ""
        raise _damaged(path, f"{gaps}{meant}", layout)
    return count


def read_arrays(path: Path, layout: Layout, convert: Callable[[NDArray[Any]], Tensor]) -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file, with their samples' clients if it has ``train_clients`` and ``test_clients``.

    Args:
        path: the file.
        layout: what it holds.
        convert: makes ``[N, C, H, W]`` of an array of samples; may raise ValueError.

    Raises:
        DataFilesMissing: the file does not have the layout.
    """
    with _opened(path, layout) as file:
        _claims(file, layout)
        checked = checked_numbers if layout.numbers else checked_labels
        labels = {part: checked(file.read(f"{part}_labels"), f"{part}_labels") for part in _PARTS}
        owners = [
            _client_numbers(file.read(key), key, len(labels[part])) if key in file.keys else (None, ())
            for part, key in CLIENTS.items()
        ]
        samples = [convert(file.read(f"{part}_{layout.kind}")) for part in _PARTS]
    train, test = (
        ImageSet(of_part, torch.from_numpy(labels[part]), clients, client_names=names)
        for part, of_part, (clients, names) in zip(_PARTS, samples, owners, strict=True)
    )
    return train, test


def _client_numbers(stored: NDArray[Any], key: str, samples: int) -> tuple[Tensor, tuple[Any, ...]]:
    """See :func:`codes_of`; names in bytes are texts in UTF-8."""
    if stored.shape != (samples,) or stored.dtype.kind not in "iuUS":
        found = f"{stored.dtype} {list(stored.shape)}"
        raise ValueError(f"{key} are {found}, not {samples} integers or names, one for each sample")
    try:
        return codes_of(np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored)
    except UnicodeDecodeError as error:
        raise ValueError(f"{key} hold names that are no texts in UTF-8 ({error})") from error


def read_npz(path: Path) -> tuple[ImageSet, ImageSet]:
    """Training and test set of a file as described in :class:`cfl.data.sources.arrays.Arrays`, channels last.

    Raises:
        DataFilesMissing: the file is not as described there.
    """
    return read_arrays(path, IMAGES, lambda stored: channels_first(stored, "last"))


def channels_first(stored: NDArray[Any], channels: str) -> Tensor:
    """``[N, C, H, W]`` of images ``[N, H, W]``, or with four dimensions and the channels ``first`` or ``last``."""
    if stored.ndim == 3:
        stored = stored[:, None]
    elif channels == "last":
        stored = stored.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(stored))


def stored_names(path: Path, layout: Layout, num_classes: int) -> tuple[str, ...]:
    """Names of the classes; none if the file has no array ``class_names``.

    Raises:
        DataFilesMissing: the file cannot be read, or ``class_names`` are not ``num_classes`` texts.
    """
    with _opened(path, layout) as file:
        found = file.read(NAMES) if NAMES in file.keys else None
    if found is None:
        return ()
    if found.shape != (num_classes,) or found.dtype.kind != "U":
        about = f"{NAMES} are {found.dtype} {list(found.shape)}, not {num_classes} texts"
        raise _damaged(path, about, layout)
    return tuple(map(str, found))
