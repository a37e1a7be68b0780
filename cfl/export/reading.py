"""Read images and tables from any files, as a run's data set reads its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.images import image_files
from cfl.data.sources.npy_images import read_array
from cfl.data.sources.npz import opened_npz
from cfl.runtime.errors import DataFilesMissing

_KEYS = ("images", "features", "test_images", "test_features")
"""Names of arrays in an ``.npz`` file with several arrays; the first one that exists is read."""


_TABLES = (".npy", ".npz", ".csv")


def read_images(places: Sequence[Path], source: Source, root: Path) -> Iterator[tuple[list[str], Tensor]]:
    """Read image files, folders of them, and arrays.

    Args:
        places: image files; folders, with all image files below them; ``.npy`` files; ``.npz`` files with one array, or
            with one of the arrays ``images``, ``features``, ``test_images`` and ``test_features``; ``.csv`` files with
            the columns of a table.
        source: the data set as whose images the files are read.
        root: folder with the data sets' files.

    Yields:
        Names and images ``[n, C, H, W]`` as the data set's ``load`` returns them. The names are files, or
        ``<file>[<row>]`` for arrays and tables.

    Raises:
        DataFilesMissing: names a file that cannot be read.
    """
    for place in places:
        if place.suffix in _TABLES and not os.path.isdir(place):
            images = _of_table(place, source, root)
            yield [f"{place}[{row}]" for row in range(len(images))], images
        else:
            for file in image_files(place) if os.path.isdir(place) else [place]:
                yield [str(file)], source.image_of_file(file, root)[None]


def _of_table(file: Path, source: Source, root: Path) -> Tensor:
    """The images ``[n, C, H, W]`` of a file that holds several."""
    if not os.path.exists(file):
        raise DataFilesMissing(f"{file}: there is no such file")
    if file.suffix == ".csv":
        return source.images_of_table(file, root)
    try:
        images = source.images_of_array(_array(file), root)
        if not len(images):
            raise ValueError(f"it holds no {'row' if source.holds_rows else 'image'}")
    except ValueError as error:
        raise DataFilesMissing(f"{file} cannot be used: {error}") from error
    return images


def _array(file: Path) -> NDArray[Any]:
    if file.suffix == ".npy":
        return read_array(file)
    with opened_npz(file) as held:
        names = held.keys if len(held.keys) == 1 else [name for name in _KEYS if name in held.keys]
        if not names:
            found = ", ".join(held.keys) or "nothing"
            raise ValueError(f"it holds {found}; expected: one array, or one called {', '.join(_KEYS)}")
        return held.read(names[0])
