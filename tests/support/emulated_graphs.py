"""CUDA graphs emulated on the CPU: a capture records aten operations, a replay computes them on the same memory.

What a real capture forbids raises :class:`Unsafe`: a number that Python reads, a result whose size depends on values,
a tensor made of Python's numbers, random numbers. Values that are not read from memory at a replay stay as captured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from cfl.engines import graphs, vmapped
from cfl.engines.chain import Chain
from cfl.randomness import counter_bits

_NUMBERS_OF_PYTHON = {"aten::lift_fresh", "aten::lift_fresh_copy"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_WITHOUT_VALUES = {
    "aten::set_",
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


class Unsafe(RuntimeError):
    """Raised for an operation that a capture does not allow."""


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Tape(TorchDispatchMode):
    """Computes and records operations; :meth:`restore` undoes their writes to memory that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor] | None]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        self._refuse(func, name, args)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        given = _tensors((args, kwargs))
        if writes:
            for tensor in given:
                if _place(tensor) not in self._own:
                    self._before.setdefault(_place(tensor), (tensor.detach(), tensor.detach().clone()))
        out = func(*args, **kwargs)
        found = _tensors(out)
        views = not writes and {_place(one) for one in found if one.numel()} & {_place(one) for one in given}
        if not views:
            self._own |= {_place(one) for one in found} - {_place(one) for one in given}
        if not views and name not in _WITHOUT_VALUES:
            kept = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, (args, kwargs))
            self.operations.append((func, *kept, None if writes else [one.detach() for one in found]))
        return out

    @staticmethod
    def _refuse(func: Any, name: str, args: Any) -> None:
        sized = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if sized or name == "aten::_local_scalar_dense" or name in _NUMBERS_OF_PYTHON:
            raise Unsafe(f"{name} waits for the device")
        if name in _INDEXING and any(one is not None and one.dtype == torch.bool for one in args[1]):
            raise Unsafe(f"{name} waits for a mask")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Unsafe(f"{name} draws random numbers")

    def restore(self) -> None:
        """Undo writes to older memory, because a real capture computes nothing."""
        for tensor, before in self._before.values():
            tensor.copy_(before)


class _Graph:
    def __init__(self, counts: Counter[str]) -> None:
        self.tape, self._counts = _Tape(), counts

    @torch.no_grad()
    def replay(self) -> None:
        self._counts["replays"] += 1
        for func, args, kwargs, memory in self.tape.operations:
            found = _tensors(func(*args, **kwargs))
            for place, value in zip(memory or [], found if memory is not None else [], strict=True):
                place.copy_(value)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def emulate(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let engines built from now on work as on a CUDA device; return the numbers of captures and replays."""
    counts: Counter[str] = Counter()

    @contextmanager
    def capturing(graph: _Graph, **_: Any) -> Iterator[None]:
        counts["captures"] += 1
        with graph.tape:
            yield
        graph.tape.restore()

    for name, value in {
        "CUDAGraph": lambda: _Graph(counts),
        "graph": capturing,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda _=None: _Stream(),
        "set_stream": lambda _: counts.update(restored=1),
        "get_rng_state": lambda _: torch.get_rng_state(),
        "set_rng_state": lambda state, _: torch.set_rng_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # Counters and hashes as on a CUDA device: numpy's operations would not be recorded.
    step = counter_bits._STEP
    monkeypatch.setattr(counter_bits, "_counter", lambda n, device: torch.arange(1, n + 1, device=device).mul_(step))
    monkeypatch.setattr(counter_bits, "_mixed", _mixed_by_torch)
    init = vmapped.VmapEngine.__init__

    def as_on_cuda(self: Any, network: Any, input_shape: Any, compile: Any, eager: bool) -> None:
        init(self, network, input_shape, compile, eager)
        self._graphs = graphs.Graphs(eager) if not list(network.buffers()) else None
        self.fuses_sgd, self._stacked_layers = self._graphs is not None, True
        self._is_chain = Chain.of(network) is not None

    monkeypatch.setattr(vmapped.VmapEngine, "__init__", as_on_cuda)
    return counts


def _mixed_by_torch(words: Tensor) -> Tensor:
    for shift, factor in counter_bits._STAGES:
        words = words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))
        words = words if factor is None else words * factor
    return words
