"""A disk that fails: in a process, the n-th operation that writes below a folder ends in an error of the system."""

from __future__ import annotations

import _io
import builtins
import errno
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attack.children import Preparation

FAULTS = {"full": errno.ENOSPC, "short": errno.ENOSPC, "broken": errno.EIO, "denied": errno.EACCES}
"""Fault -> error number. ``full``: no space from now on. ``short``: the same, after half of the data is written.
``broken``: one I/O error. ``denied``: permission is denied once."""
_OF_OPERATIONS = {
    "open": ("full", "denied", "broken"),
    "write": ("full", "short", "broken"),
    "replace": ("full", "denied", "broken"),
    "fsync": ("full", "broken"),
    "mkdir": ("full", "denied"),
}
"""Operation -> faults that can happen to it."""


@dataclass
class Disk:
    """Counts operations on files, and lets one fail.

    Attributes:
        folder: only operations on files below it count.
        at: the number of the operation that fails, from 0; None for none.
        fault: one of FAULTS.
        done: the operations so far, each with the name of its file.
    """

    folder: Path
    at: int | None = None
    fault: str = "full"
    done: list[str] = field(default_factory=list)

    def fails(self, operation: str, name: str) -> bool:
        """Count an operation on a file; return whether it fails."""
        number = len(self.done)
        self.done.append(f"{operation} {name}")
        if self.at is None:
            return False
        return number == self.at or (self.fault in ("full", "short") and number > self.at)

    def do(self, operation: str, path: Any) -> None:
        """Count an operation, or raise its error."""
        if self.fails(operation, Path(path).name):
            raise self.error(path)

    def error(self, path: Any) -> OSError:
        """Return the error of the system for the fault."""
        return OSError(FAULTS[self.fault], os.strerror(FAULTS[self.fault]), str(path))

    def holds(self, path: Any) -> bool:
        """Whether a file lies below the folder."""
        return isinstance(path, str | os.PathLike) and Path(os.path.abspath(path)).is_relative_to(self.folder)


def possible(operation: str) -> tuple[str, ...]:
    """Return the faults that can happen to an operation, which is given as in :attr:`Disk.done`."""
    return _OF_OPERATIONS[operation.partition(" ")[0]]


class _Raw(io.FileIO):
    """A file on the disk."""

    def __init__(self, path: Any, mode: str, disk: Disk) -> None:
        super().__init__(path, mode)
        self._disk = disk

    def write(self, data: Any) -> int:
        if not self._disk.fails("write", Path(str(self.name)).name):
            return super().write(data)
        if self._disk.fault == "short" and len(self._disk.done) - 1 == self._disk.at and len(data) > 1:
            return super().write(memoryview(data)[: len(data) // 2])
        raise self._disk.error(self.name)


def use(disk: Disk) -> Preparation:
    """Make a preparation that has a process write to a disk."""

    def prepare(stack: ExitStack) -> None:
        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for module in (builtins, io, _io):
            put(module, "open", _opening(disk, _io.open))
        put(os, "open", _low_opening(disk, os.open))
        put(os, "mkdir", _counted(disk, "mkdir", os.mkdir))
        put(os, "replace", _counted(disk, "replace", os.replace))
        put(os, "fsync", _on_handle(disk, "fsync", os.fsync))
        put(os, "pwrite", _on_handle(disk, "write", os.pwrite))
        put(torch, "save", _saving(disk, torch.save))

    return prepare


def _opening(disk: Disk, original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        writes = any(letter in mode for letter in "wax+") and disk.holds(file)
        if writes:
            disk.do("open", file)
        if not writes or opener is not None or buffering == 0:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), disk)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

    return opened


def _low_opening(disk: Disk, original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, flags: int, *arguments: Any, **options: Any) -> Any:
        if flags & os.O_CREAT and disk.holds(path):
            disk.do("open", path)
        return original(path, flags, *arguments, **options)

    return opened


def _counted(disk: Disk, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def counted(path: Any, *arguments: Any, **options: Any) -> Any:
        target = arguments[0] if operation == "replace" else path
        if disk.holds(target):
            disk.do(operation, target)
        return original(path, *arguments, **options)

    return counted


def _on_handle(disk: Disk, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def counted(handle: int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if disk.holds(path):
            disk.do(operation, path)
        return original(handle, *arguments)

    return counted


def _saving(disk: Disk, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch.save`` that writes through ``disk`` and raises the error of torch, which does not name the file.

    The original opens and writes files in C++, where nothing can be replaced.
    """

    def save(content: Any, file: Any, *arguments: Any, **options: Any) -> None:
        if not disk.holds(file):
            return original(content, file, *arguments, **options)
        try:
            with open(file, "wb") as written:
                return original(content, written, *arguments, **options)
        except OSError:
            text = "[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file data/0"
            raise RuntimeError(f"{text}: file write failed") from None

    return save
