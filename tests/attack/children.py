"""``cfl ...`` in a process forked from this one, within limits of time and memory."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from support import tiny_cli

from cfl.__main__ import main

SECONDS = 10.0
"""CPU seconds after which a command counts as hanging; a tiny run takes half a second."""
MEMORY = 3 << 30
"""Bytes that a command may allocate in addition to those of this process; a tiny run takes some 60 MB."""
_LARGEST_FILE = 1 << 30
_LOG_BYTES = 1 << 20
_STEP = 0.1
Program = Callable[[list[str]], int]
Preparation = Callable[[ExitStack], None]
"""Changes the process before its command begins; the stack undoes the changes when it ends."""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status, negative for a signal; None if it was stopped because it took too long.
        printed: on standard output.
        said: on standard error.
    """

    status: int | None
    printed: str
    said: str


def run(
    arguments: Sequence[str],
    prepare: Preparation | None = None,
    seconds: float = SECONDS,
    folder: Path | None = None,
    program: Program = main,
) -> Ended:
    """Run a command to its end.

    Args:
        arguments: without the program's name.
        prepare: called in the new process.
        seconds: CPU seconds that it may take. It may last three times as long, so that endless waiting is noticed, too.
        folder: where it runs; None is the current folder.
        program: function that is called with the arguments, and returns an exit status.
    """
    logs = [os.memfd_create(name) for name in ("printed", "said")]
    try:
        child = os.fork()
        if child == 0:
            _be_the_command(list(arguments), prepare, seconds, folder, program, logs)
        status = _status_of(child, 3 * seconds)
        with suppress(ProcessLookupError):  # ends processes that the command has started, which are in its group
            os.killpg(child, signal.SIGKILL)
        printed, said = (os.pread(log, _LOG_BYTES, 0).decode(errors="replace") for log in logs)
    finally:
        for log in logs:
            os.close(log)
    return Ended(None if status == -signal.SIGXCPU else status, printed, said)


def _status_of(child: int, seconds: float) -> int | None:
    """Wait for a process; None if it was killed because it took too long, not counting time in which it was stopped."""
    handle, passed = os.pidfd_open(child), 0.0
    try:
        while not select.select([handle], [], [], _STEP)[0]:
            passed += 0 if _is_stopped(child) else _STEP
            if passed > seconds:
                os.kill(child, signal.SIGXCPU)  # makes it print its stack
                select.select([handle], [], [], 1.0)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T")


def _be_the_command(
    arguments: list[str],
    prepare: Preparation | None,
    seconds: float,
    folder: Path | None,
    program: Program,
    logs: list[int],
) -> NoReturn:
    status: Any = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in background processes
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(logs)
        if folder is not None:
            os.chdir(folder)
        sys.argv = ["cfl", *arguments]
        sys.modules["__main__"].__spec__ = find_spec("cfl.__main__")  # runs start their further processes with it
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(socket.socket, "connect", _no_network))
            stack.enter_context(mock.patch.object(socket, "getaddrinfo", _no_network))
            stack.enter_context(tiny_cli.shortened(arguments))
            if prepare is not None:
                prepare(stack)
            faulthandler.register(signal.SIGXCPU, file=2, chain=True)
            _limit(seconds)
            status = program(arguments)
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
        status = 1
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _redirect(logs: list[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, *logs)):
        os.dup2(source, target)
    # New streams, because the inherited ones may hold buffered text that the parent process will write.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115


def _limit(seconds: float) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for what, most in (
        (resource.RLIMIT_CPU, int(seconds)),
        (resource.RLIMIT_AS, held + MEMORY),
        (resource.RLIMIT_FSIZE, _LARGEST_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _no_network(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


def warm() -> None:
    """Import what commands need, and build what they have in common, before processes are forked."""
    torch.set_num_threads(1)  # threads would not come along into forked processes
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        for command in ("fit", "validate", "test"):  # each is refused before it computes anything
            tiny_cli.run(command, "--config", str(tiny_cli.TINY), "--run.dir", os.devnull)
    gc.collect()
    gc.freeze()  # collections in forked processes would copy the memory that they share with this one
