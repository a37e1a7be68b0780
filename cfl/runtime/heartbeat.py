"""Says which process of a run is silent: stopped or out of reach, but not dead, so that its connections stay open."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

BEAT = 5.0
"""Seconds between two signs of life of a process."""
SILENT = 30.0
"""Seconds without a sign of life after which a process is called silent."""


class Heartbeat:
    """Runs two threads: one gives signs of life of this process and reads those of the others, one checks their age.

    Signs of life are in the process group's store, which process 0 serves: if process 0 is silent, reading blocks. The
    first process that is not silent prints, on standard error, which processes are silent and when they are back.

    Args:
        store: a connection to the store that only this object uses.
        rank: number of this process.
        count: number of processes.
        patience: seconds for which the others wait for a silent process.
    """

    def __init__(self, store: Any, rank: int, count: int, patience: float) -> None:
        self._store, self._rank, self._count, self._patience = store, rank, count, patience
        self._ended = threading.Event()
        now = time.monotonic()
        self._heard = dict.fromkeys(range(count), now)
        self._signs: dict[int, str] = {}
        self._served = now
        self._named: set[int] = set()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._give, self._look)]
        for thread in self._threads:
            thread.start()

    def silent(self) -> tuple[int, ...]:
        """The processes without a sign of life for :data:`SILENT` seconds, by rank."""
        since = time.monotonic() - SILENT
        if self._served < since:  # process 0 is silent, so nothing is known of the others
            return (0,) if self._rank else ()
        return tuple(rank for rank, heard in self._heard.items() if heard < since and rank != self._rank)

    def name(self, rank: int) -> str:
        """A process in words: its number and, if it has ever given a sign of life, host and id."""
        _, _, who = self._signs.get(rank, "").partition(" ")
        return f"process {rank}{f' ({who})' if who else ''}"

    def end(self) -> None:
        """End the threads."""
        self._ended.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)

    def _give(self) -> None:
        who = f"on {platform.node()}, pid {os.getpid()}"
        self._store.set_timeout(timedelta(seconds=self._patience))
        keys = [f"cfl alive/{rank}" for rank in range(self._count)]
        number = 0
        try:
            while not self._ended.wait(BEAT if number else 0.0):
                number += 1
                self._store.set(keys[self._rank], f"{time.time_ns()} {who}")
                known = range(self._count) if self._store.check(keys) else []
                known = known or [rank for rank, key in enumerate(keys) if self._store.check([key])]
                for rank, sign in zip(known, self._store.multi_get([keys[rank] for rank in known]), strict=True):
                    if self._signs.get(rank) != sign.decode():
                        self._signs[rank], self._heard[rank] = sign.decode(), time.monotonic()
                self._served = time.monotonic()
        except RuntimeError:  # the process that serves the store has ended, which the others notice by themselves
            self._ended.set()

    def _look(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(min(1.0, BEAT)):
            now = time.monotonic()
            if now - looked > SILENT / 2:  # this process itself was stopped, and has heard nothing meanwhile
                self._served = now
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            self._tell(self.silent())

    def _tell(self, silent: Collection[int]) -> None:
        for rank in self._named - {*silent}:
            self._print(f"{self.name(rank)} is back")
        self._named &= {*silent}
        if self._rank != min({*range(self._count)} - {*silent}, default=0):
            return
        for rank in {*silent} - self._named:
            self._print(
                f"{self.name(rank)} has given no sign of life for {SILENT:g} s: it is stopped or out of reach; the "
                f"others wait for it up to {self._patience:g} s (trainer.strategy.timeout_seconds)"
            )
        self._named |= {*silent}

    @staticmethod
    def _print(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
