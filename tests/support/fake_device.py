"""A pretended accelerator: device ``fake``, whose memory and arithmetic are the CPU's.

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map

NAME = "fake"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = Path(torch.__file__).resolve().parents[1]
_TORCH = str(_PACKAGES / "torch") + os.sep
_SETUP = "_setup_privateuseone_for_python_backend"
_CPU, _EXTENSION = 1, 12  # device types of DLPack
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_COPIES = ("aten::_copy_from", "aten::_copy_from_and_resize")


def missing() -> str | None:
    """Why this release of torch cannot have the device; None if it can."""
    return None if hasattr(registration, _SETUP) else f"this release of torch has no {_SETUP}"


Waits = Counter[tuple[str, str]]
"""What the program had to wait for, (operation, place) -> how often."""

_open: list[Waits] = []
_library: list[torch.library.Library] = []


@contextmanager
def counted() -> Iterator[Waits]:
    """Count within the context."""
    waits: Waits = Counter()
    _open.append(waits)
    try:
        yield waits
    finally:
        _open.remove(waits)


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
    """What is asked as ``torch.fake``."""
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


def _is_fake(value: Any) -> bool:
    return (
        isinstance(value, Tensor | torch.device)
        and (value.device.type if isinstance(value, Tensor) else value.type) == NAME
    )


def _to_cpu(value: Any) -> Any:
    if not _is_fake(value):
        return value
    return _as(value, _CPU) if isinstance(value, Tensor) else torch.device("cpu")


def _to_fake(value: Any) -> Any:
    return _as(value, _EXTENSION) if isinstance(value, Tensor) and value.device.type == "cpu" else value


_clone_elsewhere = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy, for ``copy.deepcopy``; torch would ask the device for memory without a tensor."""
    if not _is_fake(storage.device):
        return _clone_elsewhere(storage)
    return torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage).clone().untyped_storage()


# Operations.


@dataclass(frozen=True)
class _Kind:
    """What the schema says of an operation.

    Attributes:
        names: of the arguments.
        tensors: names of those that are single tensors.
        view: whether it returns views of its inputs.
        results: for every result the name of the argument that it is, or None for a new tensor.
        written: names of arguments that it writes to.
        waits: whether the program waits for values.
    """

    names: tuple[str, ...]
    tensors: frozenset[str]
    view: bool
    results: tuple[str | None, ...]
    written: tuple[str, ...]
    waits: bool


@cache
def _kind(op: torch._ops.OpOverload) -> _Kind:
    schema = op._schema
    written = {next(iter(a.alias_info.before_set), ""): a.name for a in schema.arguments if _writes(a)}
    returned = [result.alias_info for result in schema.returns]
    return _Kind(
        names=tuple(argument.name for argument in schema.arguments),
        tensors=frozenset(a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")),
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
    """What every operation on the device does."""
    kind, name = _kind(op), op._schema.name
    if name in _COPIES:
        return _copy(op, *args, **kwargs)
    mine = {**dict(zip(kind.names, args, strict=False)), **kwargs}
    # Torch passes tensors that stand for plain numbers as these numbers.
    mine.update({n: torch.tensor(value) for n, value in mine.items() if n in kind.tensors and _is_number(value)})
    args, kwargs = tuple(mine[n] for n in kind.names[: len(args)]), {n: mine[n] for n in kwargs}
    _refuse_mixing(name, kind, mine)
    if kind.waits:
        _note_wait(name.removeprefix("aten::"))
    if kind.view or name in ("aten::set_",):
        return op.redispatch(_ON_CPU, *args, **kwargs)
    if name == "aten::resize_":
        return _resize(*args, **kwargs)
    # A result that is still empty takes the shape that it gets.
    empty = {n: torch.empty_like(mine[n], device="cpu") for n in kind.written if _is_empty(mine[n])}
    cpu_args = [empty[n] if n in empty else _on_cpu(value) for n, value in zip(kind.names, args, strict=False)]
    cpu_kwargs = {n: empty[n] if n in empty else _on_cpu(value) for n, value in kwargs.items()}
    found = op(*cpu_args, **cpu_kwargs)
    for n, filled in empty.items():
        if filled.shape != mine[n].shape or filled.numel():
            torch.ops.aten.set_.source_Tensor.redispatch(_ON_CPU, mine[n], _to_fake(filled))
    if not kind.results:
        return None
    several = len(kind.results) > 1
    values = [
        tree_map(_to_fake, value) if which is None else mine[which]
        for which, value in zip(kind.results, found if several else (found,), strict=True)
    ]
    return tuple(values) if several else values[0]


def _on_cpu(value: Any) -> Any:
    return tree_map(_to_cpu, value) if tree_any(_is_fake, value) else value


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _refuse_mixing(name: str, kind: _Kind, arguments: dict[str, Any]) -> None:
    """As CUDA: only a CPU tensor of a single number may be read beside tensors of the device, and none written."""

    def wrong(value: Any, written: bool) -> bool:
        elsewhere = isinstance(value, Tensor) and not _is_fake(value)
        return elsewhere and (written or value.dim() > 0)

    for argument, value in arguments.items():
        if tree_any(lambda v, argument=argument: wrong(v, argument in kind.written), value):
            raise RuntimeError(
                f"{name} got tensors of {NAME} and of another device, as {argument}: "
                "Expected all tensors to be on the same device"
            )


def _convolution(*args: Any) -> Any:
    """Torch leaves convolutions to devices that it does not know."""
    return _compute(torch.ops.aten._convolution.default, *args, False, False, False, False)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    *geometry, needed = args
    bias = [weight.shape[1] * geometry[-1] if geometry[3] else weight.shape[0]]
    return _compute(torch.ops.aten.convolution_backward.default, grad, x, weight, bias, *geometry, needed)


def _copy(op: torch._ops.OpOverload, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not _is_fake(target):
        _note_wait("to the CPU")
    elif not _is_fake(source) and not non_blocking:
        _note_wait("to the device")
    if op._schema.name.endswith("resize"):
        target.resize_(source.shape)
    _to_cpu(target).copy_(_to_cpu(source))
    return target


def _resize(tensor: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    have = _as(tensor, _CPU).reshape(-1)
    new = torch.empty(size, dtype=tensor.dtype)
    kept = min(have.numel(), new.numel())
    new.view(-1)[:kept] = have[:kept]
    torch.ops.aten.set_.source_Tensor.redispatch(_ON_CPU, tensor, _to_fake(new))
    return tensor


def _note_wait(what: str) -> None:
    if _open:
        where = _place()
        for waits in _open:
            waits[what, where] += 1


def _place() -> str:
    """The innermost line of code outside torch and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((_TORCH, "<")):
            return f"{_told(Path(file))}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own thread"


def _told(file: Path) -> Path:
    """Relative to the project or to the folder of packages."""
    folder = next((f for f in (_ROOT, _PACKAGES) if file.is_relative_to(f)), None)
    return file if folder is None else file.relative_to(folder)
