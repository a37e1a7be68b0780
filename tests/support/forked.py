"""Python programs in processes of their own that need not import torch and Lightning again."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Forked:
    """``subprocess.Popen`` for ``python -m module ... descriptor``, as the benchmarks start what they measure.

    The process is forked from one that has imported the program already. Other options of ``Popen`` are ignored.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stdout: Any, pass_fds: Sequence[int], **_: Any
    ) -> None:
        python, flag, *arguments, descriptor = command
        assert (python, flag, [int(descriptor)]) == (sys.executable, "-m", list(pass_fds))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cfl.cli.main"])
        with socket.socket(fileno=os.dup(int(descriptor))) as end:
            self._process = context.Process(target=_run, args=(arguments, end, stdout.name, dict(env)))
            self._process.start()

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit status."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("forked", timeout)
        return self._process.exitcode


def _run(arguments: list[str], end: socket.socket, log: str, environment: dict[str, str]) -> None:
    os.setsid()
    with open(log, "wb", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    module, *rest = arguments
    sys.argv = [module, *rest, str(end.detach())]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
