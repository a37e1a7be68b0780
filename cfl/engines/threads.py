"""Resident threads: each computes with one math thread, and takes the next job when it has finished one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import torch

Body = Callable[[int, Any], None]


class Threads:
    """``count`` resident threads with one math thread each.

    With ``count`` 1, jobs run in the caller's thread with one math thread; with 0, with all of its math threads.

    Torch's operations let other Python threads run. Two threads with one math thread each therefore use two cores, and
    need not wait for each other after every operation as two math threads do.

    Args:
        count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._inboxes: list[SimpleQueue[tuple[Body, Iterator[Any]] | None]] = [
            SimpleQueue() for _ in range(count if count > 1 else 0)
        ]
        for number, inbox in enumerate(self._inboxes):
            threading.Thread(
                target=_serve, args=(number, inbox, self._done), name=f"client-{number}", daemon=True
            ).start()
        self.close = weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, body: Body, jobs: Iterable[Any]) -> None:
        """Call ``body(thread number, job)`` for every job; return when all are done.

        Raises:
            BaseException: the first error of a job. Other threads finish the remaining jobs before it is raised.
        """
        # Taking the next item of a list's iterator is atomic: no two threads get the same job.
        feed = iter(list(jobs))
        if not self._inboxes:
            before = torch.get_num_threads()
            if self.count == 1:
                torch.set_num_threads(1)
            try:
                for job in feed:
                    body(0, job)
            finally:
                torch.set_num_threads(before)
            return
        for inbox in self._inboxes:
            inbox.put((body, feed))
        errors = [error for error in [self._done.get() for _ in self._inboxes] if error is not None]
        if errors:
            raise errors[0]


def _serve(
    number: int,
    inbox: SimpleQueue[tuple[Body, Iterator[Any]] | None],
    done: SimpleQueue[BaseException | None],
) -> None:
    torch.set_num_threads(1)  # of this thread alone
    while (work := inbox.get()) is not None:
        body, feed = work
        try:
            for job in feed:
                body(number, job)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del work, body, feed  # a thread that waits must not keep a cohort alive


def _dismiss(inboxes: list[SimpleQueue[tuple[Body, Iterator[Any]] | None]]) -> None:
    for inbox in inboxes:
        inbox.put(None)
