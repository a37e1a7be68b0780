"""What a GPU adds to a measurement: waiting for it, its memory, and how long it was busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Report = dict[str, Any]

NOTED_ROUND = 26
"""The round, counted from 1, whose kernels are recorded: the last warm-up round on a GPU. By then even a step that is
taken once a round, such as that of a smaller last batch, is replayed as a graph."""


def wait(device: torch.device | str) -> None:
    """Return when the device has done all that it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def device_memory() -> dict[str, float]:
    """``peak_gpu_mb``: the most memory that tensors of this process took on a GPU, in MB of 10^6 bytes; 0 without."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"peak_gpu_mb": torch.cuda.max_memory_allocated() / 1e6 if used else 0.0}


@contextmanager
def busy(device: torch.device | str, report: Report) -> Iterator[None]:
    """Put ``device_seconds`` and ``device_kernels`` of what happens inside into ``report``; nothing on a CPU.

    ``device_seconds`` is the sum of the durations of all kernels and copies, as recorded by CUPTI. Recording slows the
    program, not the kernels.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as noted:
        yield
        wait(device)
    on_device = torch.autograd.DeviceType.CUDA
    found = [e for e in noted.key_averages() if e.device_type == on_device and not e.is_user_annotation]
    report["device_seconds"] = sum(event.self_device_time_total for event in found) / 1e6
    report["device_kernels"] = sum(event.count for event in found)
