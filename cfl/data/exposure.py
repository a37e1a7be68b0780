"""The samples that clients train on during a task: the task's alone, those of other tasks too, or by their own pace."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError

Exposure = Literal[
    "sequential", "unannounced", "cumulative", "joint", "asynchronous", "streaming", "streaming-cumulative"
]
EXPOSURES: tuple[Exposure, ...] = get_args(Exposure)
STREAMING = ("streaming", "streaming-cumulative")
"""Exposures in which every round has samples of its own."""
ONE_AT_A_TIME = ("sequential", "unannounced")
"""Exposures in which clients train on the samples of one task until it ends."""
OWN_PACE = ("asynchronous", *STREAMING)
"""Exposures in which no moment separates two tasks for all clients."""
UNANNOUNCED = ("unannounced", *OWN_PACE)
"""Exposures in which methods are told neither tasks nor boundaries."""

_FUZZ = 1e-9

Numbers = TypeVar("Numbers", np.ndarray, Tensor)


class GlobalIndex:
    """Numbers the samples of several training sets consecutively.

    Args:
        sizes: number of samples of each task.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._starts_on: dict[torch.device, Tensor] = {}

    def of(self, task: int, index: np.ndarray) -> np.ndarray:
        """Indices into a task's training set to global indices."""
        return index + self.starts[task]

    def tasks(self, places: Tensor) -> Tensor:
        """``[...]`` int64 global indices to the tasks that they belong to."""
        return torch.searchsorted(self._starts(places.device)[1:], places.contiguous(), right=True)

    def split(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """``[...]`` int64 global indices to tasks and indices into their training sets."""
        tasks = self.tasks(places)
        return tasks, places - self._starts(places.device)[tasks]

    def _starts(self, device: torch.device) -> Tensor:
        """:attr:`starts` on ``device``; copied to an accelerator once."""
        if device.type == "cpu":
            return torch.from_numpy(self.starts)
        if device not in self._starts_on:
            self._starts_on[device] = torch.from_numpy(self.starts).to(device)
        return self._starts_on[device]


class Handles:
    """Other numbers for samples than their global index: they identify a sample and say nothing about its task.

    Sample p has the handle ``a p + b mod N``, with a prime to N. It is computed and inverted quickly on any device.

    Args:
        count: number N of samples.
        seed: the run's seed.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = numpy_generator(seed, "handles")
        self._factor = 0
        while math.gcd(self._factor, count) != 1:
            self._factor = int(generator.integers(1, count, endpoint=True))
        self._shift = int(generator.integers(count))
        self._count, self._inverse = count, pow(self._factor, -1, count)

    def behind(self, start: int) -> Handles:
        """The same handles for numbers that count from sample ``start``, such as indices into a training set."""
        found = copy.copy(self)
        found._shift = (self._shift + start * self._factor) % self._count
        return found

    def of(self, places: Numbers) -> Numbers:
        """Handles of global indices, int64 both."""
        return (places * self._factor + self._shift) % self._count

    def global_index(self, handles: Tensor) -> Tensor:
        """Global indices of handles, int64 both."""
        return (handles - self._shift) * self._inverse % self._count


def exposed(task: int, exposure: Exposure, held: Sequence[Mapping[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """Client -> global indices of the samples that it trains on during ``task``, ordered by task.

    Args:
        task: from 0.
        exposure: ``cumulative`` or ``joint``.
        held: per task, client -> global indices of its samples.
    """
    seen = held[: task + 1] if exposure == "cumulative" else held
    return {client: np.concatenate([own[client] for own in seen if client in own]) for client in held[task]}


def portions(held: Sequence[Mapping[int, np.ndarray]], seed: int, size: int | None) -> list[dict[int, np.ndarray]]:
    """Per period, client -> ascending global indices that it trains on, with every client at its own pace.

    A client's samples are ordered by task, and randomly within a task, keyed by (seed, task, client). There are as many
    periods as tasks. Clients may be at different tasks at the same time, and a period may cross a task boundary.

    Args:
        held: per task, client -> global indices of its samples; every client in every task.
        seed: the run's seed.
        size: samples per client and period, from each client's first sample on; None cuts each client's samples into
            equal parts.

    Raises:
        ConfigError: a client does not hold every task, or has too few samples.
    """
    periods = len(held)
    clients = sorted({client for own in held for client in own})
    if any(client not in own for client in clients for own in held):
        raise ConfigError("data.exposure", "asynchronous", "a participation in which every client holds every task")
    totals = {client: sum(len(own[client]) for own in held) for client in clients}
    poorest = min(clients, key=lambda client: totals[client])
    fewest, needed = totals[poorest], periods * (size or 1)
    if fewest < periods:
        value = f"{fewest} samples of client {poorest} over {periods} portions"
        valid = "fewer data.num_clients, or a partition under which each client has a sample for every portion"
        raise ConfigError("data.partition", value, valid)
    if fewest < needed:
        valid = f"at most {fewest // periods}: client {poorest} has {fewest} samples in all"
        raise ConfigError("data.portion", size, valid)
    found: list[dict[int, np.ndarray]] = [{} for _ in range(periods)]
    for client in clients:
        parts = []
        for task, of_task in enumerate(held):
            generator = numpy_generator(seed, "clock", task, client)
            parts.append(generator.permutation(of_task[client]))
        own = np.concatenate(parts)
        cut = np.array_split(own, periods) if size is None else np.split(own[:needed], periods)
        for period, part in enumerate(cut):
            found[period][client] = np.sort(part)
    return found


def stretches(
    held: Sequence[Mapping[int, np.ndarray]], seconds: np.ndarray, rounds: int, length: float | None
) -> list[dict[int, np.ndarray]]:
    """Per round, client -> ascending global indices of the samples that it meets in it, each in one round.

    A client's samples follow one another by task, and within a task in the order of the data set. Each lasts some
    seconds, and belongs to the round in which it begins. A client may hold samples of some tasks only.

    Args:
        held: per task, client -> ascending global indices of its samples.
        seconds: ``[N]`` how long each sample lasts.
        rounds: of the run.
        length: seconds of a round, from each client's first sample on; None cuts each client's time into equal parts.

    Raises:
        ConfigError: ``data.portion``: a client's time is shorter than all rounds together, or no sample of its begins
            in some round.
    """
    found: list[dict[int, np.ndarray]] = [{} for _ in range(rounds)]
    for client in sorted({client for own in held for client in own}):
        own = np.concatenate([of_task[client] for of_task in held if client in of_task])
        ends = np.cumsum(seconds[own])
        total = float(ends[-1]) if len(own) else 0.0
        each = total / rounds if length is None else length
        if each * rounds > total * (1 + _FUZZ):
            valid = f"at most {total / rounds:.6g}: client {client} has {total:g} seconds in all for {rounds} rounds"
            raise ConfigError("data.portion", length, valid)
        # Whole parts of sums are rounded to either side of a round's end.
        begins = (ends - seconds[own]) / each if each else ends
        of_round = np.floor(begins * (1 + _FUZZ) + _FUZZ).astype(np.int64)
        if length is None:
            of_round = of_round.clip(max=rounds - 1)
        for round, here in enumerate(found):
            here[client] = own[of_round == round]
            if not len(here[client]):
                value = f"{each:.6g} seconds, in which no sample of client {client} begins in round {round}"
                raise ConfigError("data.portion", value, "longer portions, or fewer rounds and data.portion null")
    return found


def unreached(held: Sequence[Mapping[int, np.ndarray]], trained: Sequence[Mapping[int, np.ndarray]]) -> list[int]:
    """Tasks that no client trains on, ascending.

    Args:
        held: per task, client -> global indices of its samples.
        trained: per period, client -> global indices of what it trains on (:func:`portions`).
    """
    used = np.unique(np.concatenate([places for own in trained for places in own.values()]))
    return [
        task
        for task, own in enumerate(held)
        if not any(np.isin(places, used, assume_unique=True).any() for places in own.values())
    ]
