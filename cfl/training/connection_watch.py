"""Ends a process that waits for others to connect, if a signal asks for it or another process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from select import select
from typing import Any

from cfl.runtime.signals import Stopped, is_first_process

LATE = 30.0
"""Seconds after which it is said that processes are missing."""
_GRACE = 1.0
"""Seconds that the main thread has to handle a signal by itself."""


class ConnectionWatch:
    """Within the context, a thread watches for signals and ended processes, since the main thread waits inside torch.

    Args:
        children: processes that this one has started.
        count: number of processes that are to connect.
        put_away: called before this process ends.
    """

    def __init__(self, children: Sequence[subprocess.Popen], count: int, put_away: Callable[[], None]) -> None:
        self._children, self._count, self._put_away = list(children), count, put_away
        self._over = threading.Event()
        self._parent = os.getppid()

    def __enter__(self) -> None:
        self._signals, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._before: int | None = None
        with suppress(ValueError):  # only the main thread may set it
            self._before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        os.close(self._signals)
        os.close(self._told)

    def _look(self) -> None:
        late: float | None = time.monotonic() + LATE
        while not self._over.wait(0.1):
            if select([self._signals], [], [], 0)[0]:
                number = os.read(self._signals, 1)[0]
                if signal.getsignal(number) not in (None, signal.SIG_IGN) and not self._over.wait(_GRACE):
                    self._end(128 + number, str(Stopped(number)))
            for child in self._children:
                if (status := child.poll()) is not None:
                    status = 128 - status if status < 0 else status  # 128 + signal, as in shells
                    gone = f"process {child.pid}, started by this one, has ended with status {status}"
                    self._end(2, f"error: {gone} before all {self._count} processes were connected")
            if os.getppid() != self._parent:
                self._end(2, "error: the process that started this one has ended before all were connected")
            if late is not None and time.monotonic() > late:
                late = None
                self._say(f"after {LATE:.0f} s not all {self._count} processes are connected; is one of them stopped?")

    def _say(self, text: str) -> None:
        if is_first_process():
            print(text, file=sys.stderr, flush=True)

    def _end(self, status: int, text: str) -> None:
        self._say(text)
        self._put_away()
        os._exit(status)
