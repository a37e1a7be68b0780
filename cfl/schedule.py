"""Which task, which clients, which seeds: round number -> plan, as pure functions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cfl.errors import ConfigError
from cfl.randomness import numpy_generator


@dataclass(frozen=True)
class RoundPlan:
    """One communication round.

    Attributes:
        round: from 0, over all tasks.
        task: from 0.
        round_in_task: from 0.
        clients: the sampled clients' ids, ascending.
        last_of_task: whether the task ends with this round.
    """

    round: int
    task: int
    round_in_task: int
    clients: tuple[int, ...]
    last_of_task: bool


class Schedule:
    """Rounds, sampling and local work; :meth:`bind` ties it to a task stream and its clients.

    Args:
        rounds_per_task: communication rounds of every task, or a list with one number per task.
        clients_per_round: clients sampled per round, uniformly without replacement: an integer, or a
            fraction in (0, 1] of the clients that hold the task.
        local_epochs: passes of a sampled client over its data of the task.
        batch_size: samples per local step.
        drop_last: drop a client's last partial batch instead of training on it.
        cohort_width: clients trained side by side (K), or ``auto`` for the fastest in a short trial. Changes speed and
            memory, never results.
        evaluate_every: evaluate the global model every so many rounds besides each task's end; 0 = task ends only.
    """

    def __init__(
        self,
        rounds_per_task: int | list[int] = 30,
        clients_per_round: int | float = 10,
        local_epochs: int = 1,
        batch_size: int = 32,
        drop_last: bool = False,
        cohort_width: int | Literal["auto"] = "auto",
        evaluate_every: int = 0,
    ) -> None:
        for key, value, least in (
            ("local_epochs", local_epochs, 1),
            ("batch_size", batch_size, 1),
            ("evaluate_every", evaluate_every, 0),
        ):
            if value < least:
                raise ConfigError(f"schedule.{key}", value, f"an integer of at least {least}")
        if cohort_width != "auto" and (not isinstance(cohort_width, int) or cohort_width < 1):
            raise ConfigError("schedule.cohort_width", cohort_width, "an integer of at least 1, or auto")
        rounds = rounds_per_task if isinstance(rounds_per_task, list) else [rounds_per_task]
        if not rounds or min(rounds) < 1:
            raise ConfigError("schedule.rounds_per_task", rounds_per_task, "at least 1 round for every task")
        if clients_per_round <= 0 or (isinstance(clients_per_round, float) and clients_per_round > 1):
            raise ConfigError(
                "schedule.clients_per_round", clients_per_round, "an integer of at least 1, or a fraction in (0, 1]"
            )
        self.rounds_per_task = rounds_per_task
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.cohort_width = cohort_width
        self.evaluate_every = evaluate_every
        self._settled = cohort_width if isinstance(cohort_width, int) else None
        self.most_padding: float | None = None

    @property
    def width(self) -> int:
        """The cohort width in use.

        Raises:
            RuntimeError: it is ``auto`` and has not been settled.
        """
        if self._settled is None:
            raise RuntimeError("schedule.cohort_width is auto, and no width has been settled yet")
        return self._settled

    def settle_width(self, width: int, most_padding: float | None = None) -> None:
        """Say which cohort width is used from now on.

        Args:
            width: clients side by side, at most.
            most_padding: the share of a cohort's computed samples that may be padding, in [0, 1); None where padding is
                not computed.
        """
        self._settled, self.most_padding = width, most_padding

    def with_width(self, width: int) -> Schedule:
        """The same schedule with another cohort width."""
        other = copy.copy(self)
        other.cohort_width = width
        other._settled = width
        return other

    def rounds(self, num_tasks: int) -> list[int]:
        """Rounds of each task.

        Raises:
            ConfigError: if a list was given whose length is not ``num_tasks``.
        """
        if isinstance(self.rounds_per_task, int):
            return [self.rounds_per_task] * num_tasks
        if len(self.rounds_per_task) != num_tasks:
            raise ConfigError(
                "schedule.rounds_per_task", self.rounds_per_task, f"one number, or a list of {num_tasks} (one per task)"
            )
        return list(self.rounds_per_task)

    def bind(self, members: list[np.ndarray], seed: int) -> BoundSchedule:
        """The schedule of one experiment.

        Args:
            members: per task, the ids of the clients that hold it, ascending.
            seed: the run's seed.

        Raises:
            ConfigError: if a round asks for more clients than hold the task.
        """
        return BoundSchedule(self, members, seed)


class BoundSchedule:
    """:class:`Schedule` for known tasks and clients. Every answer is a pure function of (seed, round)."""

    def __init__(self, settings: Schedule, members: list[np.ndarray], seed: int) -> None:
        self.settings, self.members, self.seed = settings, members, seed
        rounds = settings.rounds(len(members))
        self._ends = np.cumsum(rounds)
        self.num_tasks = len(members)
        self.num_rounds = int(self._ends[-1])
        self._last: RoundPlan | None = None
        for task in range(self.num_tasks):
            self._sample_size(task)

    def _sample_size(self, task: int) -> int:
        wanted, present = self.settings.clients_per_round, len(self.members[task])
        if isinstance(wanted, float):
            return max(1, round(wanted * present))
        if wanted > present:
            raise ConfigError(
                "schedule.clients_per_round",
                wanted,
                f"at most {present}, the number of clients that hold task {task}, or a fraction in (0, 1]",
            )
        return wanted

    @property
    def most_clients(self) -> int:
        """The greatest number of clients in any round."""
        return max(self._sample_size(task) for task in range(self.num_tasks))

    def task_of(self, round: int) -> int:
        """Task of a round, both from 0."""
        if not 0 <= round < self.num_rounds:
            raise IndexError(f"round {round} is outside 0..{self.num_rounds - 1}")
        return int(np.searchsorted(self._ends, round, side="right"))

    def round(self, round: int) -> RoundPlan:
        """Plan of a round, the same whenever it is asked for."""
        if self._last is None or self._last.round != round:  # several places ask for the running round
            self._last = self._plan(round)
        return self._last

    def _plan(self, round: int) -> RoundPlan:
        task = self.task_of(round)
        start = 0 if task == 0 else int(self._ends[task - 1])
        generator = numpy_generator(self.seed, "sample clients", round)
        chosen = generator.choice(self.members[task], size=self._sample_size(task), replace=False)
        return RoundPlan(
            round=round,
            task=task,
            round_in_task=round - start,
            clients=tuple(np.sort(chosen).tolist()),
            last_of_task=round + 1 == int(self._ends[task]),
        )

    def evaluates_after(self, plan: RoundPlan) -> bool:
        """Whether the global model is evaluated after this round."""
        every = self.settings.evaluate_every
        return plan.last_of_task or (every > 0 and (plan.round_in_task + 1) % every == 0)
