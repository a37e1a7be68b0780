"""Runs several connected processes as Lightning's launcher does, but by forking, which saves seconds for each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor

from cfl.testing.comparing import difference
from cfl.testing.method_case import NAME, MethodCase, Run
from cfl.testing.tiny_networks import double
from cfl.testing.tiny_runs import Rounds
from cfl.training.strategy import ClientParallel

TIMEOUT = 180.0  # seconds; jobs here take a few, on a busy machine with the start of the processes up to a minute


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables that Lightning's launcher sets for one of ``size`` processes on a machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
    }


def free_port() -> int:
    """Number of a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def several(size: int = 2) -> dict[str, Any]:
    """Options of :func:`cfl.testing.tiny_runs.fit` for a process of a crew of ``size``."""
    return {"strategy": ClientParallel(timeout_seconds=TIMEOUT), "devices": size}


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ |= environment(rank, size, port)
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the crew was closed
            return
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


class Failed(Exception):
    """An error raised in a process of a crew.

    Attributes:
        kind: name of the exception's class, or ``died``.
        message: its text.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(trace)
        self.kind, self.message = kind, message


class Crew:
    """``size`` processes that wait for functions to run; their process group is reused for all jobs."""

    def __init__(self, size: int = 2) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
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
        """Call ``function``, which is pickled by name, in every process."""
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def outcome(self, rank: int) -> Any:
        """The result of one process; a :class:`Failed` if it raised an error or died."""
        if not self.pipes[rank].poll(TIMEOUT):
            raise TimeoutError(f"process {rank} of the crew neither returns nor dies")
        try:
            good, result = self.pipes[rank].recv()
        except EOFError:
            return Failed("died", "", "a process has died")
        return result if good else Failed(*result)

    def outcomes(self) -> list[Any]:
        """The results of all processes, by rank; see :meth:`outcome`."""
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
    """Nested dictionaries and lists with NumPy arrays in place of tensors, to be sent between processes.

    Entries whose keys end with ``seconds`` are left out.
    """
    if isinstance(tree, Tensor):
        return tree.detach().cpu().numpy()
    if isinstance(tree, Mapping):
        return {key: arrays(value) for key, value in tree.items() if not str(key).endswith("seconds")}
    return [arrays(value) for value in tree] if isinstance(tree, list | tuple) else tree


def check_pickles(case: MethodCase) -> None:
    """Refuse a case that cannot be sent to other processes.

    Raises:
        ValueError: the case cannot be pickled.
    """
    try:
        pickle.dumps(replace(case))  # a copy without cached runs
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"several processes need what pickles, functions and classes of modules: {error}") from error


def processes_do_not_matter(case: MethodCase, processes: int = 2, crew: Crew | None = None) -> None:
    """Several processes, each with its share of a round's clients, give the numbers of one process, in float64.

    This detects state that a method keeps on its object instead of at the clients or at the server. Processes take some
    seconds to start. ``case`` is pickled, so it may hold no lambdas and no local classes.

    Args:
        case: the method and its settings.
        processes: number of processes.
        crew: processes to use in place of new ones. A crew cannot be used again after a process has failed.

    Raises:
        AssertionError: numbers differ, or a process fails.
        ValueError: the case cannot be pickled.
    """
    check_pickles(case)
    bare = replace(case)  # a copy without cached runs
    expected = _with_one_thread(bare)
    used = crew or Crew(processes)
    processes = len(used.processes)
    try:
        found = used.run(_numbers, bare, processes)
    except Failed as error:
        what = f"{error.kind}: {error.message}"
        raise AssertionError(f"processes: {case.who} fails in {processes} processes: {what}") from error
    finally:
        if crew is None:
            used.close()
    for rank, numbers in enumerate(found):
        differs = difference(numbers, expected, case.tolerance)
        if differs:
            raise AssertionError(
                f"processes: {case.who} computes something else in {processes} processes instead of one: in process "
                f"{rank} {differs} ({case.tolerance:.3g} allowed)"
            )


def _with_one_thread(case: MethodCase) -> Any:
    """The results in this process with one thread, as in the others: rounding may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _numbers(case, 1)
    finally:
        torch.set_num_threads(before)


def _counts(topics: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    return {topic: [of["sums"], of["messages"]] for topic, of in topics.items()}


def _numbers(case: MethodCase, processes: int) -> Any:
    """The results in one process: models, states of clients and of the method, scores, bytes."""
    methods, watch = case.methods("tried"), Rounds()
    data = case.data_of(shares="unequal")
    parallel = several(processes) if processes > 1 else {}
    federation = case.start(data, methods, double(case.network), callbacks=[watch], **parallel)
    channel = federation.channel
    return arrays(
        {
            "model": {f"after round {number}": model for number, model in enumerate(watch.models, 1)},
            "what clients keep": Run(watch.models, federation, methods[NAME]).kept(),
            "state": methods[NAME].state_dict(),
            "scores": federation.measured.compute(),
            "bytes": {"up": channel.uplink_bytes, "down": channel.downlink_bytes},
            "sums of integers": {} if channel.integers is None else _counts(channel.integers.summary()["topics"]),
        }
    )
