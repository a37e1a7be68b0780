"""Reads pre-trained weights from a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cfl.runtime.checkpoint_file import require_plain, why_unread
from cfl.runtime.errors import ConfigError

KEY = "model.network.weights"


def take_weights(path: str, valid: str, take: Callable[[dict[str, Tensor]], object]) -> None:
    """Read a state dict and pass it to a function.

    Args:
        path: the file, from the current folder on; ``~`` is expanded. It holds tensors and plain values only.
        valid: description of a valid file, and where to get it.
        take: called with name -> tensor, on the CPU; any error that it raises means that the file does not fit.

    Raises:
        ConfigError: the file is absent, unreadable, or does not fit.
    """
    file = Path(path).expanduser()
    if not os.path.isfile(file):
        tried = "" if file.is_absolute() else f": {file.absolute()}"
        raise ConfigError(KEY, f"{path} (no such file{tried})", valid)
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
        require_plain(tensors, file.stat().st_size)
        if unusable := [n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]:
            raise ValueError(f"{unusable[0]} holds NaN or infinity")
        take(tensors)
    except Exception as error:  # any error of unpickling or of torch's checks
        raise ConfigError(KEY, f"{path} ({why_unread(error)})", valid) from error
