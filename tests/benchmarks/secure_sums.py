"""Seconds and bytes of secure sums: ``python -m benchmarks.secure_sums``, with ``tests`` on PYTHONPATH.

One sum for each number of clients, of neighbours and of numbers in a message, with a tenth of the clients dropping out
before their message. All parties run in this process, one after another; the seconds are of its CPU time. Sums whose
masks would take too long are run with fewer numbers. What the other numbers cost is added: of each mask, and of a
message beside its masks, both as measured in small sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from cfl.secure_sums.client import SumClient
from cfl.secure_sums.masks import add_mask
from cfl.secure_sums.protocol import ProtocolSum

NEIGHBOURS = {10: 4, 64: 16, 500: 50}
NUMBERS = (10**4, 10**5, 10**6)
MODULUS = 32
MOST_MASKED = 10**9
"""Numbers of all masks of a sum that is run as it is."""
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


def seconds_per_number() -> float:
    """CPU seconds to add one number of a mask."""
    count = 10**6
    total, best = np.zeros(count, dtype="<u4"), float("inf")
    for key in range(10):
        started = time.process_time()
        add_mask(total, key.to_bytes(32, "little"), MODULUS, 1)
        best = min(best, time.process_time() - started)
    return best / count


class PerNumber(NamedTuple):
    """CPU seconds for each number of a message: of one mask, and beside masks of a client and of the server."""

    mask: float
    client: float
    server: float


def per_number() -> PerNumber:
    """Measured in sums of four clients, of whose cost that of masks is taken away."""
    mask, clients = seconds_per_number(), 4
    costs = [min(summed(clients, None, numbers, number)[:2] for number in range(3)) for numbers in NUMBERS[1:]]
    client, server = ((more - less) / (NUMBERS[2] - NUMBERS[1]) for less, more in zip(*costs, strict=True))
    return PerNumber(mask, client / clients - clients * mask, (server - clients * mask) / clients)


@cache
def summed(clients: int, degree: int | None, numbers: int, number: int = 0) -> tuple[float, float, int, int]:
    """CPU seconds of all clients and of the server for one sum, bytes sent and received; in the ``number``-th try."""
    clock, vector, gone = Clock(), np.ones(numbers, dtype="<u4"), range(clients // 10)
    timed = {name: clock.of(getattr(SumClient, name)) for name in _OF_CLIENTS}
    started = time.process_time()
    with mock.patch.multiple(SumClient, **timed):
        run = ProtocolSum(range(clients), gone, "message", degree, np.random.default_rng(0), 0.5, numbers, MODULUS)
        for client in range(len(gone), clients):
            run.add(client, vector)
        total = run.total("the sum")
    assert (total == clients - len(gone)).all()
    return clock.seconds, time.process_time() - started - clock.seconds, run.server.up, run.server.down


def row(clients: int, degree: int | None, numbers: int, each: PerNumber) -> dict[str, Any]:
    """The figures of one sum.

    Args:
        clients: that are asked.
        degree: neighbours of each; None for all others.
        numbers: of a message.
        each: see :func:`per_number`.
    """
    near, gone = clients - 1 if degree is None else degree, clients // 10
    came = clients - gone
    count = numbers if came * (near + 1) * numbers <= MOST_MASKED else min(NUMBERS)
    of_clients, of_server, up, down = summed(clients, degree, count)
    more = numbers - count
    of_clients += more * came * ((near + 1) * each.mask + each.client)
    of_server += more * ((came + gone * near) * each.mask + came * each.server)
    return {
        "clients": clients,
        "neighbours": near,
        "numbers": numbers,
        "run": "whole" if not more else f"with {count}",
        "ms of a client": 1e3 * of_clients / clients,
        "s of the server": of_server,
        "kB up": (up / clients + more * MODULUS // 8 * came / clients) / 1e3,
        "kB down": down / clients / 1e3,
        "message kB": numbers * MODULUS // 8 / 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=list(NEIGHBOURS), help="clients of a sum")
    parser.add_argument("--numbers", type=int, nargs="+", default=list(NUMBERS), help="numbers of a message")
    given = parser.parse_args(arguments)
    each = per_number()
    found = ", ".join(f"{name} {1e9 * value:.2f} ns" for name, value in each._asdict().items())
    print(f"for a number: {found}")
    header = True
    for clients in given.clients:
        for degree in (None, NEIGHBOURS.get(clients, clients // 4 * 2)):
            for numbers in given.numbers:
                found = row(clients, degree, numbers, each)
                if header:
                    print("| " + " | ".join(found) + " |")
                    print("|" + "---:|" * len(found))
                    header = False
                cells = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in found.values())
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
