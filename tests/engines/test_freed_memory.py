"""The process keeps freed memory, unless environment variables of glibc configure its allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from cfl.engines.freed_memory import keep_freed_memory
import torch
print(keep_freed_memory())
def step():
    kept = [torch.ones(2**19) for _ in range(8)]  # 2 MiB each: 4,096 pages in all
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def run(**environment: str) -> tuple[str, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**plain, **environment}, capture_output=True, text=True, check=True
    )
    told, faults = found.stdout.split()
    return told, int(faults)


@glibc
def test_steps_do_not_fetch_their_memory_anew() -> None:
    told, faults = run()
    assert told == "True"
    assert faults < 4096  # of 40,960


@glibc
def test_the_environment_stands() -> None:
    told, faults = run(MALLOC_TRIM_THRESHOLD_="1000", MALLOC_MMAP_THRESHOLD_="100000")
    assert told == "False"
    assert faults > 20_000
