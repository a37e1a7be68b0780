"""Memories of earlier samples: a table of (task, index) per client.

A sample is stored as its index in the client's own data. The data never change, so the result is the same as if the raw
sample were stored. Memory is therefore counted in samples, and in the bytes of the raw samples.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cfl.randomness.counter_bits import random_words, random_words_at

Table = dict[str, Tensor]
"""``task`` and ``index``, ``[k, M]`` int64, -1 in empty slots; ``seen``, ``[k]`` int64, number of samples offered."""


Rule = Literal["reservoir", "sliding_window", "random_replacement"]
RULES: tuple[Rule, ...] = ("reservoir", "sliding_window", "random_replacement")

_POSITIVE = 2**63 - 1


def empty_table(size: int) -> Table:
    """The table of one client that has been offered nothing, without the axis of clients; ``size`` is M."""
    return {
        "task": torch.full((size,), -1, dtype=torch.int64),
        "index": torch.full((size,), -1, dtype=torch.int64),
        "seen": torch.zeros((), dtype=torch.int64),
    }


def append(table: Table, task: int, index: Tensor) -> None:
    """Put samples into each client's first empty slots, in place. Samples without a free slot are dropped.

    Args:
        table: table of k clients.
        task: task of the samples.
        index: ``[k, n]`` int64, each row a client's samples, then -1 for no sample.
    """
    size, offered = table["index"].shape[1], index.shape[1]
    filled = (table["index"] >= 0).sum(1, keepdim=True)
    slots = filled + torch.arange(offered)
    fits = (index >= 0) & (slots < size)
    rows, columns = fits.nonzero(as_tuple=True)
    places = slots[rows, columns]
    table["index"][rows, places] = index[rows, columns]
    table["task"][rows, places] = task
    table["seen"] += (index >= 0).sum(1)


def reservoir(table: Table, task: int, index: Tensor, keys: Tensor) -> None:
    """Offer samples one after another to each client's reservoir, in place (Vitter 1985, algorithm R).

    The n-th sample offered takes an empty slot if one is left. Otherwise it takes slot ``j``, uniform in
    ``0 .. n - 1``, if ``j`` is below the number of slots M, and is dropped if not. Every offered sample is thus held
    with the same probability ``M / n``. The draw for a client's n-th sample is a pure function of its key and n.

    Args:
        table: table of k clients.
        task: task of the samples.
        index: ``[k, n]`` int64, each row a client's samples in the order of arrival, then -1 for no sample.
        keys: ``[k]`` int64, one per client, the same in every call.
    """
    size = table["index"].shape[1]
    present = index >= 0
    number = table["seen"].unsqueeze(1) + present.cumsum(1) - 1  # how many were offered before
    last = winners(slots("reservoir", size, number, keys), present, size)
    taken = last >= 0
    table["index"] = torch.where(taken, index.gather(1, last.clamp(min=0)), table["index"])
    table["task"] = torch.where(taken, task, table["task"])
    table["seen"] += present.sum(1)


def slots(rule: Rule, size: int, number: Tensor, keys: Tensor) -> Tensor:
    """The slot that each offered sample takes, or ``size`` if it is dropped. Empty slots are filled first, in order.

    - ``reservoir``: slot j, uniform in ``0 .. n - 1``, if j is below ``size`` (Vitter 1985, algorithm R). Every sample
      offered is held with the same probability.
    - ``sliding_window``: the slot of the oldest sample. The last ``size`` samples are held.
    - ``random_replacement``: a slot drawn uniformly.

    Args:
        rule: one of the rules above.
        size: number of slots.
        number: ``[k, n]`` int64, number of samples offered to the client before this one; any value of at least -1
            where there is no sample.
        keys: ``[k]`` int64, one per client, the same in every call.

    Returns:
        ``[k, n]`` int64.
    """
    if rule == "sliding_window":
        return number % size
    draws = random_words_at(keys.unsqueeze(1), number).bitwise_and_(_POSITIVE)
    if rule == "random_replacement":
        return torch.where(number < size, number, draws % size)
    places = torch.where(number < size, number, draws % (number + 1).clamp(min=1))
    return places.clamp(max=size)


def winners(places: Tensor, present: Tensor, size: int) -> Tensor:
    """The offered sample that ends up in each slot, ``[k, size]`` int64: the last that takes the slot; -1 if none does.

    Args:
        places: ``[k, n]`` int64, the slots that :func:`slots` returns.
        present: ``[k, n]`` bool, which samples are valid.
        size: number of slots.
    """
    order = torch.arange(places.shape[1]).expand_as(places)
    last = torch.full((len(places), size + 1), -1)  # the additional slot takes the dropped samples
    return last.scatter_reduce_(1, torch.where(present, places, size), order, "amax")[:, :size]


def choose(table: Table, count: int, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ``count`` samples of each client uniformly without replacement, or all if it has fewer.

    Args:
        table: table of k clients.
        count: at least 1.
        keys: ``[k]`` int64, one per client and draw.

    Returns:
        tasks, indices and mask ``[k, m]``, ``m <= count``; task and index are -1 where the mask is False.
    """
    slots, mask = chosen(table["index"] >= 0, count, keys)
    return table["task"].gather(1, slots), table["index"].gather(1, slots), mask


def chosen(filled: Tensor, count: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draw ``count`` filled slots of each client uniformly without replacement, or all if it has fewer.

    Args:
        filled: ``[k, M]`` bool, which slots hold a sample.
        count: at least 1.
        keys: ``[k]`` int64, one per client and draw.

    Returns:
        slots ``[k, m]`` int64 and mask ``[k, m]``, ``m <= count``; slots are not filled where the mask is False.
    """
    most = min(count, int(filled.sum(1).max())) if len(filled) else 0
    if not most:
        return filled[:, :0].long(), filled[:, :0]
    ranks = random_words(keys, filled.shape[1]).bitwise_and(_POSITIVE)
    ranks = torch.where(filled, ranks, torch.full_like(ranks, _POSITIVE))
    slots = ranks.argsort(dim=1, stable=True)[:, :most]
    return slots, filled.gather(1, slots)
