"""The idx format of MNIST and its relatives: 2 zero bytes, type, number of dimensions, sizes, values."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_TIGHTEST = 1032  # bytes that one byte of a .gz unpacks to at most
_UINT8 = 8  # the type code; the only one image data sets use


def _read_shape(stream: io.BufferedIOBase, path: Path) -> tuple[int, ...]:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] != _UINT8 or start[3] == 0:
        raise ValueError(f"{path} is damaged: it does not begin with an idx header of unsigned bytes")
    sizes = stream.read(4 * start[3])
    if len(sizes) < 4 * start[3]:
        raise ValueError(f"{path} is damaged: it ends within its idx header")
    return struct.unpack(f">{start[3]}I", sizes)


def check_idx_size(path: Path) -> None:
    """Compare an unpacked idx file's size with what its header announces.

    Raises:
        ValueError: the file is cut off, too long, or no idx file.
    """
    with path.open("rb") as stream:
        shape = _read_shape(stream, path)
        start = stream.tell()
    announced, present = math.prod(shape), path.stat().st_size - start
    if announced != present:
        raise ValueError(f"{path} is damaged: its header announces {announced:,} values, it holds {present:,}")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read a whole file, unpacked or ``.gz``; the shape is the header's.

    Raises:
        ValueError: the file is cut off or no idx file.
        OSError: it cannot be opened or unpacked.
    """
    most = path.stat().st_size * (_TIGHTEST if path.suffix == ".gz" else 1)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            shape = _read_shape(stream, path)
            announced = math.prod(shape)
            values = np.frombuffer(stream.read(min(announced, most) + 1), dtype=np.uint8)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(values) != announced:
        held = f"{len(values):,}" if len(values) < announced else "more"
        raise ValueError(f"{path} is damaged: its header announces {announced:,} values, it holds {held}")
    return values.reshape(shape).copy()
