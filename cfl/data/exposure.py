"""The samples that clients train on during a task: of this task, of other tasks too, or at each client's own pace."""

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
"""Exposures without task boundaries that all clients share."""
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
        """Return the global indices of indices into a task's training set."""
        return index + self.starts[task]

    def tasks(self, global_index: Tensor) -> Tensor:
        """Return the tasks that ``[...]`` int64 global indices belong to."""
        return torch.searchsorted(self._starts(global_index.device)[1:], global_index.contiguous(), right=True)

    def split(self, global_index: Tensor) -> tuple[Tensor, Tensor]:
        """Split ``[...]`` int64 global indices into tasks and indices into their training sets."""
        tasks = self.tasks(global_index)
        return tasks, global_index - self._starts(global_index.device)[tasks]

    def _starts(self, device: torch.device) -> Tensor:
        """:attr:`starts` on ``device``; copied to an accelerator once."""
        if device not in self._starts_on:
            self._starts_on[device] = torch.from_numpy(self.starts).to(device)
        return self._starts_on[device]


class Handles:
    """Opaque numbers of samples, which identify a sample but do not show its task as global indices do.

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

    def offset_by(self, start: int) -> Handles:
        """The same handles for numbers that count from sample ``start``, such as indices into a training set."""
        found = copy.copy(self)
        found._shift = (self._shift + start * self._factor) % self._count
        return found

    def of(self, global_index: Numbers) -> Numbers:
        """Return the handles of global indices; both are int64."""
        return (global_index * self._factor + self._shift) % self._count

    def global_index(self, handles: Tensor) -> Tensor:
        """Return the global indices of handles; both are int64."""
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


def samples_by_round(
    held: Sequence[Mapping[int, np.ndarray]], seconds: np.ndarray, rounds: int, length: float | None
) -> list[dict[int, np.ndarray]]:
    """Per round, client -> ascending global indices of the samples that it meets in this round.

    A client's samples follow one another by task, and within a task in the order of the data set. Each sample lasts
    some seconds, and belongs to the round in which it begins. A sample that begins after the last round is not used. A
    client may hold samples of some tasks only.

    Args:
        held: per task, client -> ascending global indices of its samples.
        seconds: ``[N]`` how long each sample lasts.
        rounds: number of rounds of the run.
        length: seconds of a round, from each client's first sample on; None cuts each client's time into equal parts.

    Raises:
        ConfigError: ``data.portion``: a client's time is shorter than all rounds together, or none of its samples
            begins in some round; without ``length``, ``schedule.rounds_per_task`` is named for the latter.
    """
    found: list[dict[int, np.ndarray]] = [{} for _ in range(rounds)]
    for client in sorted({client for own in held for client in own}):
        own = np.concatenate([of_task[client] for of_task in held if client in of_task])
        ends = np.cumsum(seconds[own])
        if not len(own):
            valid = f"a partition that gives every client samples; client {client} has none"
            raise ConfigError("data.partition", "no samples", valid)
        total = float(ends[-1])
        each = total / rounds if length is None else length
        if each * rounds > total * (1 + _FUZZ):
            valid = f"at most {total / rounds:.6g}: client {client} has {total:g} seconds in all for {rounds} rounds"
            raise ConfigError("data.portion", length, valid)
        # A sample that begins exactly with a round may come out just before it by rounding; the fuzz corrects this.
        begins = (ends - seconds[own]) / each
        of_round = np.floor(begins * (1 + _FUZZ) + _FUZZ).astype(np.int64)
        if length is None:
            of_round = of_round.clip(max=rounds - 1)
        for round, here in enumerate(found):
            here[client] = own[of_round == round]
            if not len(here[client]):
                lacking = f"no sample of client {client} begins in round {round}"
                if length is None:
                    valid = f"fewer: in as many equal parts, of {each:.6g} seconds for it, {lacking}"
                    raise ConfigError("schedule.rounds_per_task", f"{rounds} rounds in all", valid)
                value = f"{each:.6g} seconds, in which {lacking}"
                raise ConfigError("data.portion", value, "longer portions, or fewer rounds and data.portion null")
    return found


def unreached(held: Sequence[Mapping[int, np.ndarray]], trained: Sequence[Mapping[int, np.ndarray]]) -> list[int]:
    """Tasks that no client trains on, ascending.

    Args:
        held: per task, client -> global indices of its samples.
        trained: per period or round, client -> global indices of the samples that it trains on (:func:`portions`,
            :func:`samples_by_round`).
    """
    used = np.unique(np.concatenate([samples for own in trained for samples in own.values()]))
    return [
        task
        for task, own in enumerate(held)
        if not any(np.isin(samples, used, assume_unique=True).any() for samples in own.values())
    ]
