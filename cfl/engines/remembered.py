"""Remembers the engines that trials on this machine have found, in a small file of the user's cache folder.

The environment variable ``CFL_CACHE`` names another folder, or is ``off``. A file that cannot be read is ignored. A
file that cannot be written causes a warning.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cfl.engines.choice import EngineChoice, from_dict
from cfl.engines.probe import Measured
from cfl.runtime.atomic_write import if_possible, write_whole

MOST = 256
"""Number of entries that are kept, the latest ones."""


def question(network: nn.Module, choices: Sequence[EngineChoice], *more: Any) -> str:
    """A digest of everything that decides which of some choices is the fastest.

    Args:
        network: on the device that it is trained on.
        choices: the open choices.
        more: other plain values that matter.
    """
    device = next(network.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    machine = (platform.machine(), name, os.cpu_count(), torch.get_num_threads(), str(device))
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in network.named_parameters()]
    asked = [torch.__version__, machine, repr(network), shapes, [choice.to_dict() for choice in choices], more]
    return blake2b(json.dumps(asked, default=str).encode(), digest_size=12).hexdigest()


def recall(asked: str, choices: Sequence[EngineChoice]) -> Measured | None:
    """What an earlier trial found for a :func:`question`; None if that is unknown or not among the choices."""
    entry = _entries().get(asked)
    if not isinstance(entry, dict):
        return None
    seconds = entry.get("seconds_per_client_step")
    choice = from_dict(entry.get("choice"), list(choices))
    if choice is not None and isinstance(seconds, float) and seconds > 0:
        return Measured(choice, seconds)
    return None


def remember(asked: str, found: Measured) -> None:
    """Store what a trial found for a :func:`question`."""
    file = _file()
    if file is None:
        return
    entry = {"choice": found.choice.to_dict(), "seconds_per_client_step": found.seconds_per_client_step}
    kept = {**{key: value for key, value in _entries().items() if key != asked}, asked: entry}
    with if_possible():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(dict(list(kept.items())[-MOST:]), indent=1) + "\n")


def _file() -> Path | None:
    named = os.environ.get("CFL_CACHE", "")
    if named == "off":
        return None
    above = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return (Path(named) if named else Path(above) / "cfl") / "engines.json"


def _entries() -> dict[str, Any]:
    file = _file()
    try:
        entries = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
