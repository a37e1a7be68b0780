"""Finds clients that draw the same numbers if several processes with the same seed simulate them one after another."""

from __future__ import annotations


def stream_of(position: int, clients: int, workers: int) -> int:
    """Number, from 0, of the stream of a client's random draws. Clients with the same stream draw the same numbers.

    The clients are dealt out as by ``numpy.array_split``: the first ``clients % workers`` workers have one more than
    the others. Workers with equally many clients have drawn equally often in all earlier rounds, so their p-th clients
    draw the same numbers. Workers with fewer clients are behind in the same stream and share no numbers with others.
    64 clients on 5 workers, 13 + 13 + 13 + 13 + 12: four share 13 streams, the fifth has 12 of its own.

    Args:
        position: the client's position among those of the round.
        clients: number of clients in a round, the same in every round.
        workers: at least 1.
    """
    fewer, with_more = divmod(clients, workers)
    beyond = position - with_more * (fewer + 1)
    if beyond < 0:
        return position % (fewer + 1)
    return (fewer + 1) * (with_more > 0) + beyond % fewer
