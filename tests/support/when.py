"""An action that a thread performs while the program works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls ``action`` as soon as ``condition`` holds, or after two minutes."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
