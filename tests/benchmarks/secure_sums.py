"""Seconds and bytes of secure sums: ``python -m benchmarks.secure_sums``, with ``tests`` on PYTHONPATH.

One sum is computed for each number of clients, of neighbours and of numbers in a message. A tenth of the clients drop
out before their message. All clients and the server run in this process, one after another; the seconds are its CPU
time. It takes some ten minutes, most of them for 500 clients that mask with all others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np

from cfl.secure_sums.client import SumClient
from cfl.secure_sums.protocol import ProtocolSum
from cfl.secure_sums.settings import SumSettings

NEIGHBOURS = {10: 4, 64: 16, 500: 50}
NUMBERS = (10**4, 10**5, 10**6)
MODULUS = 32
_OF_CLIENTS = ("keys", "shares", "message", "check", "unmasking")


class Clock:
    """Adds up the CPU seconds of functions.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @wraps(function)
        def timed(*given: Any) -> Any:
            started = time.process_time()
            result = function(*given)
            self.seconds += time.process_time() - started
            return result

        return timed


def summed(clients: int, degree: int | None, numbers: int) -> tuple[float, float, int, int]:
    """CPU seconds of all clients and of the server for one sum, bytes sent and received."""
    clock, vector, gone = Clock(), np.ones(numbers, dtype="<u4"), range(clients // 10)
    timed = {name: clock.of(getattr(SumClient, name)) for name in _OF_CLIENTS}
    started = time.process_time()
    with mock.patch.multiple(SumClient, **timed):
        settings = SumSettings(secure=True, seed=0, neighbours=degree)
        run = ProtocolSum(range(clients), gone, settings, np.random.default_rng(0), numbers, MODULUS)
        for client in range(len(gone), clients):
            run.add(client, vector)
        total = run.total("the sum")
    assert (total == clients - len(gone)).all()
    return clock.seconds, time.process_time() - started - clock.seconds, run.server.up, run.server.down


def row(clients: int, degree: int | None, numbers: int) -> dict[str, Any]:
    """The figures of one sum.

    Args:
        clients: clients of the sum, including those that drop out.
        degree: neighbours of each client; None for all other clients.
        numbers: length of a message.
    """
    of_clients, of_server, up, down = summed(clients, degree, numbers)
    return {
        "clients": clients,
        "neighbours": clients - 1 if degree is None else degree,
        "numbers": numbers,
        "ms of a client": 1e3 * of_clients / clients,
        "s of the server": of_server,
        "kB up": up / clients / 1e3,
        "kB down": down / clients / 1e3,
        "message kB": numbers * MODULUS // 8 / 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=list(NEIGHBOURS), help="clients of a sum")
    parser.add_argument("--numbers", type=int, nargs="+", default=list(NUMBERS), help="numbers of a message")
    given = parser.parse_args(arguments)
    header = True
    for clients in given.clients:
        for degree in (None, NEIGHBOURS.get(clients, clients // 4 * 2)):
            for numbers in given.numbers:
                found = row(clients, degree, numbers)
                if header:
                    print("| " + " | ".join(found) + " |")
                    print("|" + "---:|" * len(found))
                    header = False
                cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in found.values())
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
