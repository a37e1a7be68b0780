"""Checkpoint files with a SHA-256 of their content. A file that changed after it was written is refused."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cfl.runtime.atomic_write import OutputFile
from cfl.runtime.disk import not_written
from cfl.runtime.errors import FOR_USERS, ConfigError, reason
from cfl.runtime.memory import lack_of_memory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_ZIP = b"PK\x03\x04"
"""First bytes of files written by torch.save."""
_BEFORE_DIGEST = b"\ncfl sha256 "
_END_BYTES = len(_BEFORE_DIGEST) + 2 * hashlib.sha256().digest_size
_MARK = "ends_with_digest"
"""Entry that marks files with a digest, so that a truncated file is not taken for an old file without one."""
_AT_A_TIME = 1 << 20
"""Values checked at a time, because clients' states may not fit into memory."""
_log = logging.getLogger(__name__)


def write_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write tensors and plain values to a file, followed by the SHA-256. The caller makes the write atomic.

    torch.load can read such a file, too: it ignores the bytes behind its archive.

    Raises:
        NotWritten: it cannot be written.
    """
    file = None
    try:
        with _DigestedFile(path) as file:
            torch.save({**content, _MARK: True}, file)
            file.write(_BEFORE_DIGEST + file.digest.hexdigest().encode())
    except (OSError, RuntimeError) as error:
        failure = error if file is None else file.failure  # torch may have wrapped this error
        if not isinstance(failure, OSError):
            raise
        raise not_written(path, failure, _size_of(content)) from failure


class _DigestedFile(OutputFile):
    """A file that is written from beginning to end, with the SHA-256 of what has been written so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.digest = hashlib.sha256()

    def seekable(self) -> bool:
        """Return False: the digest is computed over bytes in writing order."""
        return False

    def write(self, data: ReadableBuffer, /) -> int:
        """See the base class."""
        written = super().write(data)
        self.digest.update(data)
        return written


class _Counter(io.BytesIO):
    """A file that counts the bytes written to it, and keeps none."""

    count = _END_BYTES

    def write(self, data: ReadableBuffer, /) -> int:
        """Count the data."""
        size = memoryview(data).nbytes
        self.count += size
        return size


def _size_of(content: Mapping[str, Any]) -> int:
    """Size of a checkpoint's file."""
    counter = _Counter()
    torch.save({**content, _MARK: True}, counter)
    return counter.count


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file of :func:`write_checkpoint`. Tensors are on the CPU, mapped from the file.

    The whole file is read once for its digest, 0.7 s a GB. An old file without a digest is read with a
    warning.

    Raises:
        ConfigError: the file is no checkpoint, was changed or damaged, or holds weights that are not finite, or a
            tensor that is not plain or claims more bytes than the file has.
    """
    try:
        carries_digest = _is_as_written(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        require_plain(checkpoint, path.stat().st_size)
    except Exception as error:  # torch may raise any error for a damaged file
        valid = f"a whole checkpoint written by cfl fit ({why_unread(error)})"
        raise ConfigError("ckpt_path", str(path), valid) from error
    if not isinstance(checkpoint, dict) or "federation" not in checkpoint:
        raise ConfigError("ckpt_path", str(path), "a checkpoint written by cfl fit")
    if not carries_digest and checkpoint.get(_MARK):
        raise ConfigError("ckpt_path", str(path), "a whole checkpoint written by cfl fit (its end is missing)")
    if not carries_digest:
        _log.warning("%s carries no digest, as it was written before there were any: changes would not be seen", path)
    with refusing_what_cfl_does_not_write(path):
        for name, tensor in _weights(checkpoint):
            if tensor.is_floating_point() and not all(bool(part.isfinite().all()) for part in tensor.split(_AT_A_TIME)):
                valid = f"a checkpoint with finite weights; {name} holds NaN or infinity"
                raise ConfigError("ckpt_path", str(path), valid)
    return checkpoint


@contextmanager
def refusing_what_cfl_does_not_write(path: Path) -> Iterator[None]:
    """Within the context, which should only use what a checkpoint holds, refuse the file instead of any other error.

    Raises:
        ConfigError: an error that is not for users was raised, because the checkpoint lacks an entry or holds a value
            of another type or shape.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (*FOR_USERS, OSError)) or lack_of_memory(error):
            raise
        valid = f"a checkpoint as cfl fit writes it ({type(error).__name__}: {reason(error)[:300]})"
        raise ConfigError("ckpt_path", str(path), valid) from error


def require_plain(held: Any, size: int) -> None:
    """Refuse tensors that are not strided or quantised, have no values, or repeat few values to more than ``size``.

    Args:
        held: what a file holds.
        size: bytes of the file.

    Raises:
        ValueError: there is such a tensor.
    """
    known: set[int] = set()  # a list may hold itself
    waiting = [held]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            if one.layout != torch.strided or one.is_quantized or one.is_nested or one.device.type != "cpu":
                raise ValueError(f"it holds a tensor that is not plain: {one.layout}, {one.dtype}, {one.device}")
            if one.nbytes > max(size, _AT_A_TIME):
                raise ValueError(f"it holds a tensor of {one.nbytes:,} bytes, more than the {size:,} of the file")
        elif isinstance(one, Mapping | list | tuple | set) and id(one) not in known:
            known.add(id(one))
            waiting += one.values() if isinstance(one, Mapping) else one


def why_unread(error: Exception) -> str:
    """Why ``torch.load`` with ``weights_only`` could not read a file; torch itself advises to run the file's code."""
    if isinstance(error, UnpicklingError):
        return "it holds more than tensors and plain values; other objects could run code, and are not read"
    if "PytorchStreamReader" in str(error) or (isinstance(error, OSError) and error.errno == errno.EINVAL):
        return "it is damaged, or cut off"
    return reason(error)[:300]


def _is_as_written(path: Path) -> bool:
    """Check a file against its digest. Returns False if the file carries none.

    Raises:
        ValueError: the digest does not match, or the file is of another kind.
    """
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:  # torch's own message would be about its options
            raise ValueError("this file is not a checkpoint")
        size = file.seek(0, os.SEEK_END) - _END_BYTES
        file.seek(max(0, size))
        end = file.read()
        if not end.startswith(_BEFORE_DIGEST):
            return False
        file.seek(0)
        digest, left = hashlib.sha256(), size
        while left and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    if end != _BEFORE_DIGEST + digest.hexdigest().encode():
        raise ValueError("its content has changed since it was written")
    return True


def _weights(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the global model, first and now, of the server's momentum and of clients' models, flattened."""
    federation = checkpoint["federation"]
    yield from ((name, tensor.reshape(-1)) for name, tensor in checkpoint.get("state_dict", {}).items())
    for what, tensors in (
        ("the initial", federation.get("initial", {})),
        ("the server's momentum of", federation.get("server", {}).get("velocity", {})),
    ):
        yield from ((f"{what} {name}", tensor.reshape(-1)) for name, tensor in tensors.items())
    of_clients = federation.get("clients", {}).get("model", {}).get("rows", {})
    for dtype, rows in of_clients.items():
        yield f"clients' weights ({dtype})", rows.reshape(-1)
