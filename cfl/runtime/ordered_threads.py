"""Runs jobs on several threads and returns results in the jobs' order."""

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
    """Run ``compute(tool, job)`` for every job, with one thread per tool, and yield results in the order of the jobs.

    With one tool, everything runs in the caller's thread with its math threads. With more, each thread has one math
    thread, and the caller may use a result while the threads compute the next ones. ``jobs`` is read in the caller's
    thread, one job for each result taken: at most ``len(tools) + 1`` jobs are running or have results waiting.

    Raises:
        BaseException: the error of a job, when its result is due; later jobs are dropped.
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
