"""The machine and the versions with which figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import ENVIRONMENT
from cfl import __version__


def processor() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, cores, system, load before the measurement, and the user's thread settings."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
        "environment": {k: v for k, v in sorted(ENVIRONMENT.items()) if k.startswith(("OMP_", "MKL_", "GOMP_"))},
    }


def versions() -> dict[str, str]:
    """Versions of Python, of ``cfl`` and of the libraries that compute."""
    names = ("torch", "lightning", "numpy")
    return {"python": platform.python_version(), "cfl": __version__, **{name: version(name) for name in names}}
