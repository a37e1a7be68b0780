"""Refuses what does not fit into the machine's memory before it is allocated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch.overrides import TorchFunctionMode

from cfl.runtime.errors import ConfigError

_MAKING = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
_SMALL = 2**20
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes of memory that this process may still take: those of the machine, or of the container it runs in."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError, KeyError):  # another system, or no limit
        return free
    return min(free, limit - used + _of_files())


def _of_files() -> int:
    """Bytes of files in the container's memory, which the system frees when memory is needed."""
    try:
        held = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(held["active_file"]) + int(held["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def require_memory(key: str, value: Any, needed: float, valid: str) -> None:
    """Refuse an option that asks for more memory than there is.

    Args:
        key: of the option.
        value: its value.
        needed: bytes.
        valid: what would be valid, as a phrase.

    Raises:
        ConfigError: with the bytes needed and those that are free.
    """
    if needed > (free := free_memory()):
        raise ConfigError(key, value, f"{valid}: {_size(needed)} would be needed, and {_size(free)} are free")


def lack_of_memory(error: BaseException) -> MemoryError | None:
    """A MemoryError with a message of one line if the error is a lack of memory, else None."""
    text = str(error).partition("\n")[0]
    lacking = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text
    if not lacking:
        return None
    less = "a smaller network, batch_size or cohort_width, or fewer clients and stored samples, need less"
    return MemoryError(f"there is not enough memory: {less}" + f" ({text})" * bool(text))


class WithinMemory(TorchFunctionMode):
    """Within the context, refuse new tensors that together would take more memory than is free.

    Args:
        key: of the option that decides their sizes.
        value: its value; with None, the error names the tensor that is too large.
        valid: what would be valid, as a phrase.
        copies: number of copies of all tensors that there will be in the end.

    Raises:
        ConfigError: before the tensor is allocated.
    """

    def __init__(self, key: str, value: Any, valid: str, copies: int = 1) -> None:
        super().__init__()
        self._key, self._value, self._valid, self._copies = key, value, valid, copies
        self._taken = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, after a check of the memory that it would allocate."""
        kwargs = kwargs or {}
        if func in _MAKING:
            given = kwargs["size"] if "size" in kwargs else args[0] if isinstance(args[0], Sequence) else args
            try:
                size: float = func(*args, **{**kwargs, "device": "meta"}).nbytes
            except RuntimeError as error:  # the call itself will report any other error
                size = math.inf if "overflow" in str(error) else 0
            self._taken += size
            if size > _SMALL:
                sizes = " x ".join(map(str, given))
                value = f"a tensor of {sizes} numbers" if self._value is None else self._value
                require_memory(self._key, value, self._copies * self._taken, self._valid)
        return func(*args, **kwargs)


def _size(count: float) -> str:
    return decimal(int(count)) if math.isfinite(count) else "more memory than there is anywhere"
