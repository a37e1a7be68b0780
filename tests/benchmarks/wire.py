"""Messages between the coordinator and a measured process: one JSON object per line over a socket pair.

A process that is idle sends a report of what it did last, and waits. ``round`` makes it run one round, ``stop`` makes
it report its memory and end. At any moment one process computes and all others sleep.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from benchmarks.accelerator import device_memory
from benchmarks.memory import memory

Report = dict[str, Any]


class WireClosed(ConnectionError):
    """The other end is gone."""


class Wire:
    """One end of the pair.

    Args:
        end: a connected socket.
        timeout: seconds to wait for a line before ``TimeoutError``; None waits for ever.
    """

    def __init__(self, end: socket.socket, timeout: float | None = None) -> None:
        self._end = end
        self._end.settimeout(timeout)
        self._buffer = b""

    @classmethod
    def from_descriptor(cls, number: int) -> Wire:
        """Return the end that this process inherited under a file descriptor."""
        return cls(socket.socket(fileno=number))

    def send(self, report: Report) -> None:
        """Send one object.

        Raises:
            WireClosed: the other end is closed.
        """
        try:
            self._end.sendall(json.dumps(report).encode() + b"\n")
        except OSError as error:
            raise WireClosed("the other end is gone") from error

    def receive(self) -> Report:
        """Wait for one object.

        Raises:
            WireClosed: the other end is closed.
            TimeoutError: nothing came in time.
        """
        while b"\n" not in self._buffer:
            try:
                part = self._end.recv(65536)
            except TimeoutError:
                raise
            except OSError as error:
                raise WireClosed("the other end is gone") from error
            if not part:
                raise WireClosed("the other end is gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        report: Report = json.loads(line)
        return report

    def close(self) -> None:
        """Close the socket."""
        self._end.close()


def serve(wire: Wire, info: Report, play: Callable[[], Report]) -> None:
    """Run the main loop of a measured process until the coordinator stops it.

    Args:
        wire: to the coordinator.
        info: first report, about the process.
        play: runs one round, returns its report.
    """
    report = info
    while True:
        wire.send(report)
        if wire.receive()["do"] == "stop":
            break
        report = play()
    wire.send({**memory(), **device_memory()})
