"""Do something to a program while it works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Do something as soon as a condition holds."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
