"""Ends the program when a signal asks for it: one line, the exit status that shells expect, and no traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end."""
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


class Stopped(BaseException):
    """Raised when a signal asks the program to end.

    Args:
        number: of the signal.

    Attributes:
        status: exit status of the program.
        advice: text on what the user may do then, printed after the message.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number
        self.advice = ""


class _Program:
    """State that the handler needs.

    Attributes:
        runs: whether the handler is installed.
        holds: whether the program has something to clean up, so that a signal must end it by an exception.
        terminals: descriptors of the output that goes to a terminal.
    """

    runs = False
    holds = False
    terminals: tuple[int, ...] = ()


def ended_by_signals(main: Callable[[], int]) -> int:
    """Run a program that signals may end at any time; return its exit status.

    Args:
        main: the program; returns its exit status.
    """
    try:
        with _handlers():
            return main()
    except Stopped as stopped:
        if is_first_process():
            print(f"{stopped}{stopped.advice}", file=sys.stderr)
        return stopped.status


def hold() -> None:
    """Let signals end the program by :class:`Stopped` from now on, so that it cleans up.

    Before this call, a signal ends the process directly, because an exception may be swallowed while modules are
    imported.
    """
    _Program.holds = True


def stop(number: int, frame: FrameType | None = None) -> None:
    """Handle a signal by ending the program. A second signal ends it at once.

    Raises:
        Stopped: after :func:`hold`.
    """
    for each in NUMBERS:
        _set(each, signal.SIG_DFL)
    leave_terminal(number)
    if _Program.holds:
        raise Stopped(number)
    if is_first_process():
        os.write(2, f"{Stopped(number)}\n".encode())
    os._exit(128 + number)


def leave_terminal(number: int) -> None:
    """After SIGHUP, discard output to the terminal: it is gone, and every output would be an error."""
    if number == signal.SIGHUP and _Program.terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in _Program.terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


def at_once(number: int) -> Any:
    """The handler that ends the process at once. Elsewhere than in the program, SIGINT raises KeyboardInterrupt."""
    ends = _Program.runs or number != signal.SIGINT
    return signal.SIG_DFL if ends else signal.default_int_handler


def is_ignored(number: int) -> bool:
    """Whether a signal is ignored, for example because the program was started by nohup."""
    return signal.getsignal(number) == signal.SIG_IGN


def take_over() -> None:
    """In the program, handle signals by :func:`stop` again, after a library may have set its own handlers."""
    if _Program.runs:
        for number in NUMBERS:
            _set(number, stop)


@contextmanager
def _handlers() -> Iterator[None]:
    """Within the context, signals end the program. Nothing is done outside the main thread."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    _Program.holds = False
    _Program.terminals = tuple(descriptor for descriptor in (1, 2) if os.isatty(descriptor))
    try:
        for number in NUMBERS:
            _set(number, stop)
    except ValueError:
        yield
        return
    _Program.runs = True
    try:
        yield
    finally:
        _Program.runs = False
        for number, handler in before.items():
            signal.signal(number, handler)


def _set(number: int, handler: Any) -> None:
    if not is_ignored(number):
        signal.signal(number, handler)


def is_first_process() -> bool:
    """Whether this is the only process, or the first of several, according to launchers' environment variables."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)
