"""The coordinator's turns, for a program that has its own loop over rounds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.memory import descendants, memory_of_tree
from benchmarks.wire import Report, Wire


class Turns:
    """Lets a round begin when the coordinator says so, and measures it.

    Args:
        wire: to the coordinator.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._report: Report = {"threads": torch.get_num_threads()}
        self._started = 0.0

    def say(self, **about: Any) -> None:
        """Add figures about the process to the report that comes before the first round."""
        self._report |= about

    def begin(self) -> None:
        """Report the last round, and wait for the next one to begin; if there is none, end all processes."""
        self._wire.send(self._report)
        if self._wire.receive()["do"] == "stop":
            self._wire.send(memory_of_tree())
            for process in descendants():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os._exit(0)
        self._started = time.perf_counter()

    def end(self, weights: Callable[[], Iterable[Any]]) -> None:
        """End the round.

        Args:
            weights: returns the new global weights, for the :func:`fingerprint`; called after the round was measured.
        """
        seconds = time.perf_counter() - self._started
        self._report = {"started": self._started, "seconds": seconds, "fingerprint": fingerprint(weights())}
