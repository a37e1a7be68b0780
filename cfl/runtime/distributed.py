"""Communication between the processes of a run: ranks, exchange of values and tensors, and failures.

With a single process every function returns its argument. With several, all processes must call the functions that
exchange something, in the same order. Plain values are sent on the CPU, tensors on their own device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cfl.runtime.errors import FOR_USERS
from cfl.runtime.heartbeat import Heartbeat
from cfl.runtime.signals import Stopped

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface of gloo's messages."""
_FAILURE = "cfl failure"
_PATIENCE = 1.0  # seconds to wait for the reason of a failure after the failed process has ended


_watch: list[Heartbeat] = []
"""The heartbeat of this process, while it is connected to others."""


class ProcessFailed(RuntimeError):
    """Another process of the run has failed, ended or does not answer; the message says which one and why."""


def count() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if count() > 1 else 0


def gather(value: T) -> list[T]:
    """Collect a value from every process, by rank.

    Args:
        value: small; anything that can be pickled.

    Raises:
        ProcessFailed: if another process failed before this call.
    """
    if count() == 1:
        return [value]
    values: list[T] = [value] * count()
    with answered():
        dist.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """Send the value of process 0 to all processes.

    Args:
        value: anything that can be pickled; ignored in the other processes.

    Raises:
        ProcessFailed: if another process failed before this call.
    """
    values = [value]
    if count() > 1:
        with answered():
            dist.broadcast_object_list(values, 0)
    return values[0]


def computed_once(compute: Callable[[], T]) -> T:
    """Run a computation in process 0 and return its result in all processes.

    Args:
        compute: returns tensors, plain values, and dictionaries, lists and tuples of these. With several processes the
            returned tensors are on the CPU.

    Raises:
        ProcessFailed: if another process failed before this call.
    """
    if count() == 1:
        return compute()
    return from_first(cast(T, tree_map_only(Tensor, Tensor.cpu, compute()) if rank() == 0 else None))


def add_up(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add tensors up over all processes, with bit-identical results in each.

    Args:
        tensors: name -> tensor; a name that a process does not have counts as zeros there.

    Returns:
        name -> sum, for all names of all processes. There is one reduction per dtype, whatever the number of names.

    Raises:
        ValueError: if processes have tensors of different shape or dtype under one name.
        ProcessFailed: if another process failed before this call.
    """
    if count() == 1:
        return dict(tensors)
    known: dict[str, tuple[torch.Size, torch.dtype, str]] = {}
    for described in gather({n: (t.shape, t.dtype, t.device.type) for n, t in tensors.items()}):
        for name, description in described.items():
            if known.setdefault(name, description) != description:
                raise ValueError(f"{name!r} is {known[name]} in one process and {description} in another")
    sums: dict[str, Tensor] = {}
    for kind in dict.fromkeys((dtype, device) for _, dtype, device in known.values()):
        names = [n for n, (_, dtype, device) in known.items() if (dtype, device) == kind]
        sizes = [math.prod(known[n][0]) for n in names]
        flat = torch.zeros(sum(sizes), dtype=kind[0], device=kind[1])
        parts = dict(zip(names, flat.split(sizes), strict=True))
        for name, part in parts.items():
            if name in tensors:
                part.copy_(tensors[name].detach().reshape(-1))
        with answered():
            dist.all_reduce(flat)
        sums |= {name: part.view(known[name][0]) for name, part in parts.items()}
    return {name: sums[name] for name in known}


def share_out(own: Mapping[Key, Mapping[str, Tensor]]) -> dict[Key, dict[str, Tensor]]:
    """Send every process's tensors to all others: key -> name -> tensor. This process's own tensors are not copied.

    Each process sends its tensors in one message.

    Raises:
        ValueError: if two processes have the same key.
        ProcessFailed: if another process failed before this call.
    """
    found = {key: dict(tensors) for key, tensors in own.items()}
    if count() == 1:
        return found
    flat = [(key, name, t) for key, tensors in own.items() for name, t in tensors.items()]
    listing = [(key, name, t.shape, t.dtype) for key, name, t in flat]
    listings = gather((list(own), listing, {t.device.type for _, _, t in flat}))
    sources: dict[Key, int] = {}
    for source, (keys, _, _) in enumerate(listings):
        for key in keys:
            if sources.setdefault(key, source) != source:
                raise ValueError(f"{key!r} comes from processes {sources[key]} and {source}")
            found.setdefault(key, {})
    kinds = set().union(*(kinds for _, _, kinds in listings))
    device = torch.device("cpu" if len(kinds) != 1 else kinds.pop())
    for source, (_, listing, _) in enumerate(listings):
        sizes = [math.prod(shape) * dtype.itemsize for _, _, shape, dtype in listing]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if source == rank() and len(message):
            torch.cat([_bytes_of(t).to(device) for _, _, t in flat], out=message)
        if len(message):
            with answered():
                dist.broadcast(message, source)
        if source != rank():
            for (key, name, shape, dtype), part in zip(listing, message.split(sizes), strict=True):
                # A copy: a view would keep the whole message in memory, and may not be aligned for its dtype.
                found[key][name] = part.clone().view(dtype).view(shape)
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def leave() -> None:
    """Close the connection to the other processes, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


# Failures of a process.


def watch(patience: float) -> None:
    """Start to report silent processes; see :class:`cfl.runtime.heartbeat.Heartbeat`.

    Args:
        patience: seconds for which this process waits for the others.
    """
    unwatch()
    if count() > 1:
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()  # a connection of its own, which blocks while process 0 is silent
        _watch.append(Heartbeat(store, rank(), count(), patience))


def unwatch() -> None:
    """End :func:`watch`."""
    while _watch:
        _watch.pop().end()


def report_failure(error: BaseException) -> None:
    """Tell the other processes that this one is about to end, and why."""
    if count() > 1:
        reason = str(error) if isinstance(error, (*FOR_USERS, Stopped)) else f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):  # no other process is left
            dist.distributed_c10d._get_default_store().compare_set(_FAILURE, "", f"process {rank()}: {reason}")


def failure_elsewhere() -> str | None:
    """The reason that a failed process reported, or None if no process has failed."""
    if count() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.get(_FAILURE).decode() if store.check([_FAILURE]) else None
    except RuntimeError:
        return "process 0 has ended"


def cause_elsewhere(error: BaseException | None) -> ProcessFailed | None:
    """The failure of another process among the causes of an error, or None if this process failed by itself."""
    while error is not None and not isinstance(error, ProcessFailed):
        error = error.__cause__
    return error


def raise_if_one_failed() -> None:
    """Check whether another process has failed, by a message to process 0.

    Raises:
        ProcessFailed: with its reason.
    """
    reason = failure_elsewhere()
    if reason is not None:
        raise ProcessFailed(reason)


@contextmanager
def answered() -> Iterator[None]:
    """Within the context, a failed exchange of messages raises the reason of the failure, if it is known.

    Raises:
        ProcessFailed: in place of the errors of torch.distributed.
    """
    try:
        yield
    except RuntimeError as error:
        until = time.monotonic() + _PATIENCE
        reason = failure_elsewhere()
        while reason is None and time.monotonic() < until:
            time.sleep(0.05)
            reason = failure_elsewhere()
        raise ProcessFailed(reason or _silence(error)) from error


def _silence(error: RuntimeError) -> str:
    """Why messages are not answered, if no process has reported a reason."""
    silent = [watch.name(rank) for watch in _watch for rank in watch.silent()]
    if silent:
        return f"{' and '.join(silent)} did not answer within trainer.strategy.timeout_seconds: stopped or out of reach"
    said = (str(error).splitlines() or [""])[0]
    advice = ""
    if "connectFullMesh" in said and "remote=[127." in said:
        advice = f"; if it is on another machine, set {GLOO_INTERFACE} to the network interface towards it, e.g. eth0"
    return f"a process has ended without a word, or did not answer within the strategy's timeout ({said}){advice}"
