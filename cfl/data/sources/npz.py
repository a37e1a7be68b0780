"""Reads the arrays of an ``.npz`` file, after holding what their headers claim against the file's size."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TIGHTEST = 200
"""Bytes that one byte of a large archive may unpack to. Deflate gets to 1032 with zeros; no images are like that."""
_SMALL = 1 << 30
"""Bytes of an array from which on that is asked."""


class Claim(NamedTuple):
    """What the header of a stored array says of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzFile:
    """An open ``.npz`` file; :func:`opened_npz` makes it.

    Args:
        archive: the file.
        size: its bytes.
    """

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive, self._size = archive, size
        self.keys = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]

    def claim(self, key: str) -> Claim:
        """Shape and type of an array, without reading it."""
        if (times := self.keys.count(key)) != 1:
            raise ValueError(f"it holds {key} {times} times" if times else f"it lacks {key}")
        info = self._archive.getinfo(f"{key}.npy")
        with self._archive.open(info) as member:
            try:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
            except Exception as error:  # whatever a parser of Python's own can raise, MemoryError included
                raise ValueError(f"{key} has no header of numpy's: {error or type(error).__name__}") from error
            held = info.file_size - member.tell()
        if dtype.hasobject:
            raise ValueError(f"{key} holds Python objects, which only a pickle could restore; pickles are not read")
        claimed = math.prod(shape) * dtype.itemsize
        if claimed != held:
            said = f"{key} is {dtype} {list(shape)} by its header"
            raise ValueError(f"{said}, which takes {claimed:,} bytes, but {held:,} are stored")
        packed = min(info.compress_size, self._size)
        if info.file_size > max(_SMALL, _TIGHTEST * packed):
            raise ValueError(f"{key} would unpack from {packed:,} to {info.file_size:,} bytes, as no images do")
        return Claim(shape, dtype)

    def read(self, key: str) -> NDArray[Any]:
        """The whole array."""
        self.claim(key)
        with self._archive.open(f"{key}.npy") as member:
            array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
        return array


@contextmanager
def opened_npz(path: Path) -> Iterator[NpzFile]:
    """Open an ``.npz`` file for the time of a ``with`` block, in which nothing but its arrays should be read.

    Raises:
        ValueError: whatever is wrong with the file, in one line without its name.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz archive, or cut off")
        with zipfile.ZipFile(path) as archive:
            yield NpzFile(archive, path.stat().st_size)
    except Exception as error:  # zipfile, zlib and numpy raise whatever they trip over
        raise ValueError(f"{' '.join(str(error).split()) or type(error).__name__:.300}") from error
