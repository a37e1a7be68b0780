"""Runs one simulator as a measured process: ``python -m benchmarks.simulators MODULE WORK DATA DEVICE DESCRIPTOR``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.simulators.turns import Turns
from benchmarks.wire import Wire

if __name__ == "__main__":
    module, work_file, data, _, descriptor = sys.argv[1:]
    # Not run as __main__ itself: some simulators import its functions by name in processes of their own.
    simulator = import_module(f"benchmarks.simulators.{module}")
    simulator.main(Path(work_file), Path(data), Turns(Wire.from_descriptor(int(descriptor))))
