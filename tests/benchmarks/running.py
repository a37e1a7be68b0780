"""A measured process, from the coordinator's side."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import ENVIRONMENT
from benchmarks.wire import Report, Wire, WireClosed

TESTS = Path(__file__).resolve().parents[1]

TIMEOUT = 900.0
"""Seconds without a report after which a process is given up."""


class NotRun(RuntimeError):
    """An engine did not start, or died; the message says why."""


class Running:
    """A process that runs a round on request. It is a context manager, and leaving it ends the process.

    Args:
        command: the file descriptor of its wire is appended.
        log: file for what it prints.
        environment: added to the user's.
        timeout: seconds to wait for a report.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(TESTS), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours, timeout)
        self._finished = False
        self._started = time.perf_counter()
        with log.open("wb") as output, theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                cwd=TESTS.parent,
                env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that it can be ended with the processes it starts
            )

    def ready(self) -> Report:
        """Wait until the process is ready for a round; return its report about itself, and ``startup_seconds``.

        Raises:
            NotRun: the process ends, or sends nothing in time.
        """
        return self._receive() | {"startup_seconds": time.perf_counter() - self._started}

    def round(self) -> Report:
        """Let the process run one round and wait again; return its report.

        Raises:
            NotRun: as :meth:`ready`.
        """
        self._send("round")
        return self._receive()

    def finish(self) -> Report:
        """Let the process end; return the report of its memory.

        Raises:
            NotRun: as :meth:`ready`.
        """
        self._send("stop")
        report = self._receive()
        with suppress(subprocess.TimeoutExpired):
            self._finished = self._process.wait(30) == 0
        return report

    def end(self) -> None:
        """Kill the process and all that it has started, if they still run."""
        self._wire.close()
        if not self._finished:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._finished = True

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *reason: object) -> None:
        self.end()

    def _send(self, word: str) -> None:
        try:
            self._wire.send({"do": word})
        except WireClosed as error:
            raise NotRun(self._why()) from error

    def _receive(self) -> Report:
        try:
            return self._wire.receive()
        except TimeoutError as error:
            raise NotRun(f"no answer in time, see {self.log}") from error
        except WireClosed as error:
            raise NotRun(self._why()) from error

    def _why(self) -> str:
        """Exit status of the process and the last line that it printed."""
        try:
            status = self._process.wait(30)
        except subprocess.TimeoutExpired:
            return f"it hung up, see {self.log}"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {status}: {lines[-1] if lines else 'no output'}"
