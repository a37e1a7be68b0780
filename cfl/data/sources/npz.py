"""Reads the arrays of an ``.npz`` file, after comparing the sizes in their headers with the stored bytes."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfl.runtime.errors import reason

_TIGHTEST = 200
"""Bytes that one byte of a large array may unpack to. Deflate reaches 1032 for zeros; images stay far below."""
_SMALL = 1 << 30
"""Arrays of up to this many bytes may unpack by any factor."""


class Claim(NamedTuple):
    """Shape and type of a stored array, as its header gives them."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class NpzFile:
    """An open ``.npz`` file; :func:`opened_npz` makes it.

    Args:
        archive: the file.
        size: size of the file in bytes.
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
            except Exception as error:  # numpy parses headers as Python, which can even raise MemoryError
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
    """Open an ``.npz`` file for a ``with`` block, which should do nothing but read its arrays.

    Raises:
        ValueError: in place of every exception of the block: what is wrong with the file, in one line without its name.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz archive, or cut off")
        with zipfile.ZipFile(path) as archive:
            yield NpzFile(archive, path.stat().st_size)
    except Exception as error:  # zipfile, zlib and numpy raise exceptions of many classes
        raise ValueError(reason(error)[:300]) from error
