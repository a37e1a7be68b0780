"""A fake accelerator: device ``fake``, whose memory and arithmetic are the CPU's.

It finds operations that mix devices, and counts what a real accelerator would make the program wait for: numbers that
Python reads (``item``, ``tolist``, ``bool``), copies to the CPU, copies to the device without ``non_blocking``, and
operations whose result's shape depends on values (``nonzero``, masks as indices). It does not find what only a real
device has: other rounding, asynchronous kernels that read memory that has changed since, CUDA graphs, streams, pinned
memory, and code behind ``device.type == "cuda"``.

Three things differ from CUDA. A CPU tensor of a single number may take part in every operation, not just elementwise
ones. Kernels of CUDA that wait by themselves are unknown here, unless torch marks the operation so. Random numbers come
from the CPU's generator.

Registration is for the whole process and cannot be undone, so call :func:`register` in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor

NAME = "fake"
_ROOT = Path(__file__).resolve().parents[2]
_MOVING = str(_ROOT / "cfl" / "runtime" / "moving.py")
_PACKAGES = Path(torch.__file__).resolve().parents[1]
_TORCH = str(_PACKAGES / "torch") + os.sep
_SETUP = "_setup_privateuseone_for_python_backend"
_CPU, _EXTENSION = 1, 12  # device types of DLPack
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_TENSOR = ("Tensor", "Optional[Tensor]")
_PLAIN = (int, float, bool, type(None), torch.dtype)
_COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize")


def missing() -> str | None:
    """Why this release of torch cannot have the device; None if it can."""
    return None if hasattr(registration, _SETUP) else f"this release of torch has no {_SETUP}"


Counts = Counter[tuple[str, str]]
"""(operation, place) -> how often."""


@dataclass
class Traffic:
    """What passes between the program and the device.

    Attributes:
        waits: what the program has to wait for.
        copies: tensors that are copied to or from the device, waited for or not.
    """

    waits: Counts = field(default_factory=Counter)
    copies: Counts = field(default_factory=Counter)


_open: list[Traffic] = []
_library: list[torch.library.Library] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count waits and copies within the context."""
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)


def register() -> None:
    """Make the device known to torch in this process."""
    if not _library:
        getattr(registration, _SETUP)(NAME, backend_module=_module())
        _library.append(torch.library.Library("_", "IMPL"))
        _library[0].fallback(_compute, "PrivateUse1")
        torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
        _library.append(torch.library.Library("aten", "IMPL"))
        _library[1].impl("convolution_overrideable", _convolution, "PrivateUse1")
        _library[1].impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")


def _module() -> Any:
    """Return the module that torch uses as ``torch.fake``."""
    module = registration._DummyBackendModule()
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return module


def registered() -> bool:
    """Whether this process has the device."""
    return bool(_library)


# Memory: a tensor of the device and one of the CPU share it.


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Head(ctypes.Structure):
    """Beginning of a DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _as(tensor: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor)
    device = _Head.from_address(_pointer(capsule, b"dltensor")).device
    device.kind, device.index = kind, 0
    return torch._C._from_dlpack(capsule)


def _is_fake(value: Tensor | torch.device) -> bool:
    return (value.device if isinstance(value, Tensor) else value).type == NAME


def _to_fake(value: Any) -> Any:
    """Results of the CPU as those of the device."""
    if isinstance(value, Tensor):
        return _as(value, _EXTENSION) if value.is_cpu else value
    return [_to_fake(each) for each in value] if isinstance(value, list) else value


_clone_elsewhere = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy, for ``copy.deepcopy``; torch would ask the device for memory without a tensor."""
    if not _is_fake(storage.device):
        return _clone_elsewhere(storage)
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage).clone().untyped_storage()


# Operations.


@dataclass(frozen=True)
class _Kind:
    """What the schema says about an operation.

    Attributes:
        name: name of the operation.
        names: names of its arguments.
        not_numbers: names of arguments that must be tensors, though torch passes numbers where users wrote numbers.
        view: whether it returns views of its inputs.
        results: for every result the name of the argument that it is, or None for a new tensor.
        written: names of arguments that it writes to.
        waits: whether the program waits for values.
    """

    name: str
    names: tuple[str, ...]
    not_numbers: tuple[str, ...]
    view: bool
    results: tuple[str | None, ...]
    written: tuple[str, ...]
    waits: bool


@cache
def _kind(op: torch._ops.OpOverload) -> _Kind:
    schema = op._schema
    written = {next(iter(a.alias_info.before_set), ""): a.name for a in schema.arguments if _writes(a)}
    returned = [result.alias_info for result in schema.returns]
    takes_numbers = torch._C._should_allow_numbers_as_tensors(schema.name.removeprefix("aten::"))
    return _Kind(
        name=schema.name,
        names=tuple(argument.name for argument in schema.arguments),
        not_numbers=() if takes_numbers else tuple(a.name for a in schema.arguments if str(a.type) in _TENSOR),
        view=any(info is not None and not info.is_write for info in returned),
        results=tuple(
            written.get(next(iter(info.before_set), "")) if info is not None and info.is_write else None
            for info in returned
        ),
        written=tuple(written.values()),
        waits=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags)),
    )


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _compute(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Compute an operation of the device, whichever it is, with the CPU's arithmetic."""
    kind = _kind(op)
    name = kind.name
    if name in _COPIES:
        return _copy(op, *args, **kwargs)
    if kind.view:
        return op.redispatch(_ON_CPU, *args, **kwargs)
    given = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    mine = {n: value if type(value) in _PLAIN else _read(kind, n, value) for n, value in given.items()}
    for argument in kind.not_numbers:
        if isinstance(mine.get(argument), bool | int | float | complex):
            mine[argument] = _as_tensor(mine[argument], mine)
    if kind.waits:
        _note(name.removeprefix("aten::"))
    if name == "aten::set_":
        return op.redispatch(_ON_CPU, *args, **kwargs)
    if name == "aten::resize_":
        return _resize(*args, **kwargs)
    # A result that is still empty takes the shape that it gets.
    empty = [n for n in kind.written if isinstance(given[n], Tensor) and not given[n].numel()]
    for n in empty:
        mine[n] = torch.empty_like(given[n], device="cpu")
    found = op(*list(mine.values())[: len(args)], **{n: mine[n] for n in kwargs})
    for n in empty:
        if mine[n].shape != given[n].shape or mine[n].numel():
            torch.ops.aten.set_.source_Tensor.redispatch(_ON_CPU, given[n], _to_fake(mine[n]))
    if not kind.results:
        return None
    if kind.results == (None,):
        return _to_fake(found)
    several = len(kind.results) > 1
    values = [
        _to_fake(value) if which is None else given[which]
        for which, value in zip(kind.results, found if several else (found,), strict=True)
    ]
    return tuple(values) if several else values[0]


def _read(kind: _Kind, argument: str, value: Any) -> Any:
    """An argument as the CPU takes it.

    Raises:
        RuntimeError: a tensor of the CPU. As with CUDA, such a tensor may only have no dimensions, and is not written.
    """
    if isinstance(value, Tensor):
        if not value.is_cpu:
            return _as(value, _CPU)
        if value.dim() or argument in kind.written:
            raise RuntimeError(
                f"{kind.name} got tensors of {NAME} and of another device, as {argument}: "
                "Expected all tensors to be on the same device"
            )
        return value
    if isinstance(value, list | tuple):
        return [_read(kind, argument, each) for each in value]
    if isinstance(value, torch.device):
        return torch.device("cpu") if _is_fake(value) else value
    return value


def _as_tensor(number: Any, beside: dict[str, Any]) -> Tensor:
    """A number as a tensor that leaves the result's type as the number would."""
    other = [value for value in beside.values() if isinstance(value, Tensor)][-1]
    return torch.tensor(number, dtype=torch.result_type(other, number))


def _convolution(*args: Any) -> Any:
    """Compute a convolution, which torch leaves to devices that it does not know."""
    return _compute(torch.ops.aten._convolution.default, *args, False, False, False, False)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    *geometry, needed = args
    bias = [weight.shape[1] * geometry[-1] if geometry[3] else weight.shape[0]]
    return _compute(torch.ops.aten.convolution_backward.default, grad, x, weight, bias, *geometry, needed)


def _copy(op: torch._ops.OpOverload, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    leaves, comes = not _is_fake(target), not _is_fake(source)
    if leaves or comes:
        _note("to the CPU" if leaves else "to the device", wait=leaves or not non_blocking, copy=True)
    if op._schema.name.endswith("resize"):
        target.resize_(source.shape)
    _as(target, _CPU).copy_(_as(source, _CPU))
    return target


def _resize(tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    have = _as(tensor, _CPU).reshape(-1)
    new = torch.empty(size, dtype=tensor.dtype)
    kept = min(have.numel(), new.numel())
    new.view(-1)[:kept] = have[:kept]
    torch.ops.aten.set_.source_Tensor.redispatch(_ON_CPU, tensor, _to_fake(new))
    return tensor


def _note(what: str, wait: bool = True, copy: bool = False) -> None:
    if _open:
        where = _place()
        for traffic in _open:
            traffic.waits[what, where] += wait
            traffic.copies[what, where] += copy


def _place() -> str:
    """The innermost line of code outside torch, this file and ``cfl/runtime/moving.py``, by which others copy."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in (__file__, _MOVING) and not file.startswith((_TORCH, "<")):
            return f"{_told(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own thread"


@cache
def _told(name: str) -> Path:
    """A file relative to the project or to the folder of packages."""
    file = Path(name)
    folder = next((f for f in (_ROOT, _PACKAGES) if file.is_relative_to(f)), None)
    return file if folder is None else file.relative_to(folder)
