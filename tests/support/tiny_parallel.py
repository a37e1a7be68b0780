"""Several processes at once, connected as Lightning's launcher connects them but forked, which saves seconds each."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.engines.cohort import Cohort
from cfl.methods import Method
from cfl.training.strategy import ClientParallel

TIMEOUT = 60.0  # seconds; nothing here takes a tenth of that


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What Lightning's launcher tells a process of ``size`` on one machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def several(size: int = 2) -> dict[str, Any]:
    """Options of ``tiny.fit`` for a process of a crew."""
    return {"strategy": ClientParallel(timeout_seconds=TIMEOUT), "devices": size}


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ |= environment(rank, size, port)
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # nobody has any more work
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class Failed(Exception):
    """What a process of a crew has raised.

    Attributes:
        kind: name of the exception's class, or ``died``.
        message: its text.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(trace)
        self.kind, self.message = kind, message


class Crew:
    """``size`` processes that wait for functions to run; the group of one job serves the next, too."""

    def __init__(self, size: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cfl.cli.main"])
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            here, there = context.Pipe()
            self.processes.append(context.Process(target=_work, args=(rank, size, port, there), daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have every process call ``function``, which pickles by name."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def outcome(self, rank: int) -> Any:
        """What one of them returned; a :class:`Failed` if it has raised, or has died without a word."""
        if not self.pipes[rank].poll(TIMEOUT):
            raise TimeoutError(f"process {rank} of the crew neither returns nor dies")
        try:
            good, result = self.pipes[rank].recv()
        except EOFError:
            return Failed("died", "", "a process has died")
        return result if good else Failed(*result)

    def outcomes(self) -> list[Any]:
        """What each of them returned, by rank; see :meth:`outcome`."""
        return [self.outcome(rank) for rank in range(len(self.pipes))]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function`` in all processes and return the results by rank; the first error is raised."""
        self.start(function, *arguments)
        found = self.outcomes()
        for result in found:
            if isinstance(result, Failed):
                raise result
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def arrays(tree: Any) -> Any:
    """Nested dictionaries and lists with NumPy arrays for tensors, so that they pass between processes as they are."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, Mapping):
        return {key: arrays(value) for key, value in tree.items() if not str(key).endswith("seconds")}
    return [arrays(value) for value in tree] if isinstance(tree, list | tuple) else tree


def assert_close(found: Any, expected: Any, tolerance: float, place: str = "") -> None:
    """Equality of nested dictionaries and lists, floating point arrays up to ``tolerance``."""
    if isinstance(expected, Mapping):
        assert set(found) == set(expected), place
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert_close(left, right, tolerance, f"{place}/{number}")
    elif isinstance(expected, np.ndarray | float):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=place)
    else:
        assert found == expected, place


class Poison(Method):
    """Breaks what one client sends in round 1."""

    def __init__(self, client: int) -> None:
        self.client = client

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        for position in positions:
            if cohort.round == 1 and cohort.clients[position] == self.client:
                cohort.parameters["head.bias"].data[position] = torch.nan
