"""Starts commands of ``cfl`` as processes that are forked from one that has already imported the program.

Three kinds of processes take part. The *server* imports the program once. It computes nothing, so that it has no math
threads, which a fork would lose. For every command it forks a *keeper*, which forks the command and reports the
command's process id and exit status to the process that started it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from cfl.runtime.cpu_cores import usable_cores
from cfl.runtime.errors import ConfigError

_NUMBER = struct.Struct("!i")
_LOST = 255
"""Exit status of a command whose keeper is gone."""
_SERVER = "import sys; sys.path[:] = {path!r}; from cfl.running.launcher import serve; serve({descriptor})"
_IMPORTED = ("cfl.__main__", "cfl.cli.main")


def environment_for(jobs: int) -> dict[str, str]:
    """The environment of runs if ``jobs`` runs share the cores. A given ``OMP_NUM_THREADS`` is kept.

    Raises:
        ConfigError: ``jobs`` is below 1.
    """
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "an integer of at least 1")
    return {"OMP_NUM_THREADS": str(max(1, len(usable_cores()) // jobs)), **os.environ}


class Launched:
    """A command that was started.

    Args:
        wire: the connection to its keeper.
    """

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self.pid = _number(wire)
        self._status = _LOST if self.pid is None else None
        wire.setblocking(False)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the command runs."""
        if self._status is None:
            with suppress(BlockingIOError):
                status = _number(self._wire)
                self._status = _LOST if status is None else status
                self._wire.close()
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.pid is not None and self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


class Launcher:
    """Starts commands, each in a session of its own.

    Args:
        environment: environment of the server. Math libraries read their number of threads from it on import.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._wire: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> socket.socket:
        """Start the server, unless it runs already, and return the connection to it. Does not wait for its imports."""
        if self._wire is None:
            self._wire, theirs = socket.socketpair()
            with theirs:
                program = _SERVER.format(path=sys.path, descriptor=theirs.fileno())
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-c", program],  # without the current folder in front of the path
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C comes to the starter alone
                    env=self._environment,
                )
        return self._wire

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: int, lock: int) -> Launched:
        """Start a command of ``cfl``.

        Args:
            words: the command line without the program's name.
            environment: environment of the command.
            log: descriptor of the file for the command's output.
            lock: descriptor of a file that the command holds open until it ends.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.begin(), [b"."], [theirs.fileno(), log, lock])
        ours.sendall(json.dumps([list(words), dict(environment)]).encode() + b"\n")
        return Launched(ours)

    def close(self) -> None:
        """End the server. Commands that run go on."""
        if self._wire is not None and self._server is not None:
            self._wire.close()
            self._server.kill()  # it may still be importing
            self._server.wait()
            self._wire = self._server = None


def _number(wire: socket.socket) -> int | None:
    """The next number from a keeper; None if that is gone."""
    with suppress(ConnectionError):
        received = wire.recv(_NUMBER.size, socket.MSG_WAITALL)
        return int(_NUMBER.unpack(received)[0]) if received else None
    return None


def serve(descriptor: int) -> None:
    """Run the server until its starter closes the connection.

    Args:
        descriptor: file descriptor of the connection.
    """
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()  # collections in forked processes would copy the memory that they share with this one
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    with socket.socket(fileno=descriptor) as wire:
        while True:
            _, descriptors, _, _ = socket.recv_fds(wire, 1, 3)
            if not descriptors:
                return
            if os.fork() == 0:
                break
            for each in descriptors:
                os.close(each)
    _keep(*descriptors)


def _keep(descriptor: int, log: int, lock: int) -> NoReturn:
    """Run the keeper of a command, and in its child the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    with socket.socket(fileno=descriptor) as wire:
        with wire.makefile("rb") as file:
            words, environment = json.loads(file.readline())
        command = os.fork()
        if command != 0:
            os.close(lock)
            with suppress(OSError):  # the starter is gone
                wire.sendall(_NUMBER.pack(command))
            status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
            with suppress(OSError):
                wire.sendall(_NUMBER.pack(status))
            os._exit(0)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["cfl", *words]
    sys.modules["__main__"].__spec__ = find_spec("cfl.__main__")  # Lightning starts further processes with it
    _end_with(import_module("cfl.__main__").main)


def _end_with(program: Callable[[], int]) -> NoReturn:
    """Run a program and end this process like Python, but without its half a second of taking modules apart."""
    status: Any = 1
    try:
        status = program()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
