"""Jobs on several threads, results in the jobs' order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch

Tool = TypeVar("Tool")
Job = TypeVar("Job")
Result = TypeVar("Result")


def in_order(compute: Callable[[Tool, Job], Result], jobs: Iterable[Job], tools: Sequence[Tool]) -> Iterator[Result]:
    """``compute(tool, job)`` for every job, one tool per thread; results come in the order of the jobs.

    With one tool all happens in the caller's thread, with the math threads it has; with more, each thread has one math
    thread, and the caller may use a result while the threads compute the next ones. A job is taken from ``jobs``, in
    the caller's thread, when one that came before has been handed over: no more than ``len(tools) + 1`` are under way
    or wait for the caller.

    Raises:
        BaseException: what a job raised, in its turn; later jobs are dropped.
    """
    if len(tools) == 1:
        yield from (compute(tools[0], job) for job in jobs)
        return
    free: SimpleQueue[Tool] = SimpleQueue()
    for tool in tools:
        free.put(tool)

    def with_a_tool(job: Job) -> Result:
        tool = free.get()
        try:
            return compute(tool, job)
        finally:
            free.put(tool)

    waiting: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(len(tools), "in-order", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for job in jobs:
            waiting.append(threads.submit(with_a_tool, job))
            if len(waiting) > len(tools):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
