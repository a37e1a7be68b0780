"""Stores numbered rows of equal size, in memory or in a file."""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cfl.runtime.atomic_write import write_all
from cfl.runtime.disk import writing
from cfl.runtime.errors import DamagedFile

_BLOCK_BYTES = 1 << 24
_CHECKED_BYTES = 1 << 20
"""Bytes read at a time for checking: few enough that the allocator returns them to the system."""


class MemoryRows:
    """Rows ``[width]`` of one dtype, numbered from 0 in the order in which they were first written.

    They are in memory: on the CPU until values of another device are written, then on that device. They are stored in
    blocks, so that adding rows copies one block at most.

    Args:
        width: number of values in a row.
        dtype: dtype of the values.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self._rows_of_block = max(1, _BLOCK_BYTES // max(1, width * dtype.itemsize))
        self._blocks: list[Tensor] = []
        self._device = torch.device("cpu")

    def write(self, rows: np.ndarray, values: Tensor) -> None:
        """Store ``values`` ([k, width]) at ``rows`` ([k] int64, distinct). New rows continue the existing numbers."""
        if values.device != self._device and self._device.type != "cpu":
            values = values.to(self._device)  # rather than all rows the other way
        elif values.device != self._device:
            self._device = values.device
            self._blocks = [block.to(self._device) for block in self._blocks]
        self._make_room(int(rows.max(initial=-1)) + 1, values)
        for block, here, within in self._places(rows):
            block.index_copy_(0, within, values if here is None else values[here])

    def read(self, rows: np.ndarray) -> Tensor:
        """Values ``[k, width]`` of the rows with these numbers ([k] int64), in new memory."""
        values = torch.empty((len(rows), self.width), dtype=self.dtype, device=self._device)
        for block, here, within in self._places(rows):
            if here is None:
                torch.index_select(block, 0, within, out=values)
            else:
                values[here] = block[within]
        return values

    def read_to_cpu(self, rows: np.ndarray) -> Tensor:
        """As :meth:`read`, in memory of the CPU. The rows' device holds one block of the copy at a time."""
        if self._device.type == "cpu":
            return self.read(rows)
        values = torch.empty((len(rows), self.width), dtype=self.dtype)
        for start in range(0, len(rows), self._rows_of_block):
            values[start : start + self._rows_of_block] = self.read(rows[start : start + self._rows_of_block]).cpu()
        return values

    def _make_room(self, count: int, like: Tensor) -> None:
        """Allocate blocks for ``count`` rows.

        The last block grows by doubling, because a GPU, unlike a CPU, takes all of a block's memory at once.
        """
        whole = self._rows_of_block
        for number in range(max(0, len(self._blocks) - 1), -(-count // whole)):
            if number == len(self._blocks):
                self._blocks.append(like.new_empty((0, self.width)))
            block, wanted = self._blocks[number], min(whole, count - number * whole)
            if len(block) < wanted:
                grown = like.new_empty((min(whole, max(wanted, 2 * len(block))), self.width))
                grown[: len(block)] = block
                self._blocks[number] = grown

    def _places(self, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Each block that holds some of ``rows``, with their positions in ``rows`` (None: all) and in the block."""
        numbers = rows // self._rows_of_block
        within = torch.from_numpy(rows % self._rows_of_block).to(self._device)
        present = np.unique(numbers).tolist()
        if len(present) == 1:
            yield self._blocks[present[0]], None, within
            return
        for number in present:
            here = torch.from_numpy(np.flatnonzero(numbers == number)).to(self._device)
            yield self._blocks[number], here, within[here]


class FileRows:
    """As :class:`MemoryRows`, in an unnamed file, whose space the system frees when the process ends, or is killed.

    Rows are read and written by system calls instead of memory-mapped. A mapped file that does not fit on the disk
    kills the process without a message, every touched page counts as the process's memory, and writing took six times
    as long. A checksum of every row is kept in memory, so that a row damaged on the disk is not used.

    Args:
        width: number of values in a row.
        dtype: dtype of the values.
        folder: folder of the file; None takes the system's temporary folder.
    """

    def __init__(self, width: int, dtype: torch.dtype, folder: Path | None) -> None:
        self.width, self.dtype = width, dtype
        self._row_bytes = width * dtype.itemsize
        self._sums = np.zeros(0, dtype=np.uint32)
        self._folder = folder or Path(tempfile.gettempdir())
        self._name = f"the file of what clients keep, in {self._folder},"
        with writing(self._folder, name=self._name):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  open while rows are wanted

    def write(self, rows: np.ndarray, values: Tensor) -> None:
        """See :meth:`MemoryRows.write`.

        Raises:
            NotWritten: the disk is full, or fails.
        """
        data, size = _bytes_of(values.detach().cpu().contiguous()), self._row_bytes
        if (more := int(rows.max(initial=-1)) + 1 - len(self._sums)) > 0:
            self._sums = np.concatenate([self._sums, np.zeros(more, dtype=np.uint32)])
        self._sums[rows] = self._checksums(data, len(rows))
        with writing(self._folder, len(data), self._name):
            for start, stop in runs(rows):
                self._file.seek(int(rows[start]) * size)
                write_all(self._file.fileno(), data[start * size : stop * size])

    def read(self, rows: np.ndarray) -> Tensor:
        """See :meth:`MemoryRows.read`; on the CPU.

        Raises:
            DamagedFile: a row differs from what was written.
        """
        values = torch.empty((len(rows), self.width), dtype=self.dtype)
        data, size = _bytes_of(values), self._row_bytes
        for start, stop in runs(rows):
            part, offset = data[start * size : stop * size], int(rows[start]) * size
            while part:
                count = os.preadv(self._file.fileno(), [part], offset)
                if count == 0:
                    if rows[start] >= len(self._sums):
                        raise EOFError(f"row {rows[start]} has never been written")
                    raise DamagedFile(f"{self._name} is damaged: it ends before row {rows[start]}; it was cut")
                part, offset = part[count:], offset + count
        self._check(data, rows)
        return values

    def first(self, count: int) -> Tensor:
        """Rows 0 to ``count - 1``, ``[count, width]``, as a memory map of the file.

        Later writes change the returned values. All rows are read once to check them. The system reads mapped pages
        when they are used, and frees them when memory is short.

        Raises:
            DamagedFile: a row differs from what was written.
        """
        if count * self._row_bytes == 0:
            return torch.empty((count, self.width), dtype=self.dtype)
        for start in range(0, count, at_once := max(1, _CHECKED_BYTES // self._row_bytes)):
            self.read(np.arange(start, min(start + at_once, count)))  # not through the map, whose pages count as memory
        mapped = mmap.mmap(self._file.fileno(), count * self._row_bytes)
        return torch.frombuffer(mapped, dtype=self.dtype).view(count, self.width)

    def _checksums(self, data: memoryview, count: int) -> list[int]:
        """The checksums of ``count`` rows that lie one behind the other."""
        size = self._row_bytes
        return [zlib.crc32(data[row * size : (row + 1) * size]) for row in range(count)]

    def _check(self, data: memoryview, rows: np.ndarray) -> None:
        """Compare the checksums of rows that were read into ``data`` with those of the written rows."""
        changed = np.flatnonzero(self._sums[rows] != np.array(self._checksums(data, len(rows)), dtype=np.uint32))
        if len(changed):
            row = rows[changed[0]]
            raise DamagedFile(f"{self._name} is damaged: row {row} is not what was written; the disk has changed it")


def runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and stop of every stretch of ``rows`` ([k] int64) in which each number follows its predecessor."""
    breaks = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    if len(rows):
        yield from zip([0, *breaks], [*breaks, len(rows)], strict=True)


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor ``[k, width]``."""
    return values.reshape(-1).view(torch.uint8).numpy().data
