"""The schedule: the task and the sampled clients of a round, as pure functions of its number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from cfl.data.client_clocks import can_differ, rounds_of_clients
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers


@dataclass(frozen=True)
class RoundPlan:
    """The plan of one communication round.

    If clients have their own clocks (``schedule.clock_spread``), ``task`` is the task of the slowest clients and ends
    when they have finished it. The round then consists of :attr:`parts`, each with the task of its clients.

    Attributes:
        round: from 0, over all tasks.
        task: from 0.
        round_in_task: from 0.
        clients: the sampled clients' ids, ascending.
        last_of_task: whether the task ends with this round.
        groups: only if clients have their own clocks: a plan for each group of clients that began the same task in the
            same round, and that either all end it with this round or all go on with it.
    """

    round: int
    task: int
    round_in_task: int
    clients: tuple[int, ...]
    last_of_task: bool
    groups: tuple[RoundPlan, ...] = ()

    @property
    def parts(self) -> tuple[RoundPlan, ...]:
        """Plans of one task each: :attr:`groups`, or this plan if all clients are at the same task."""
        return self.groups or (self,)


class Schedule:
    """Settings of rounds, sampling and local work.

    :meth:`bind` makes the schedule of an experiment of them.

    Args:
        rounds_per_task: communication rounds of every task, or a list with one number per task.
        clients_per_round: clients sampled per round, uniformly without replacement: an integer, or a
            fraction in (0, 1] of the clients that hold the task, rounded to the nearest integer, halves to the even
            one, at least 1.
        sampling: ``fixed``: as many clients as ``clients_per_round`` says. ``poisson``: each client that holds the task
            joins a round independently, with the probability for which ``clients_per_round`` is the expected number (a
            fraction is the probability). The number of clients then varies. A round may have no client; it changes the
            model only if noise is added.
        client_dropout: share of a round's clients that drop out of it, in [0, 1). Their number is rounded to the
            nearest integer, halves to the even one; one client always stays. A share with which no client would drop
            out of any round is refused. If a method asks clients after a round, the same share of the clients that were
            not sampled drops out. A client that drops out before its message is left out of the round: it keeps the
            state that it had before.
        dropout_stage: first message that clients that drop out do not send: their ``keys``, ``shares`` or ``message``,
            or, with the message already in the sum, the ``check`` or the ``unmasking`` of a secure sum
            (docs/secure-sums.md).
        local_epochs: passes of a sampled client over its data of the task.
        batch_size: samples per local step.
        drop_last: drop a client's last partial batch instead of training on it.
        cohort_width: clients trained side by side (K), or ``auto`` for the fastest in a short trial. Changes speed and
            memory, and results only by rounding.
        evaluate_every: evaluate the global model every so many rounds besides each task's end; 0 = task ends only.
        clock_spread: s in [0, 1). Above 0 clients do not change tasks together: each spends its own number of rounds on
            each task, drawn once from ``rounds_per_task`` times 1 - s to 1 + s
            (:func:`cfl.data.client_clocks.rounds_of_clients`), and then begins the next. Clients that have learned all
            of their tasks leave. The run ends when all have left.
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
        clock_spread: float = 0.0,
        sampling: Literal["fixed", "poisson"] = "fixed",
        client_dropout: float = 0.0,
        dropout_stage: Literal["keys", "shares", "message", "check", "unmasking"] = "message",
    ) -> None:
        check_integers("schedule", 1, local_epochs=local_epochs, batch_size=batch_size)
        check_integers("schedule", 0, evaluate_every=evaluate_every)
        if cohort_width != "auto" and (not isinstance(cohort_width, int) or cohort_width < 1):
            raise ConfigError("schedule.cohort_width", cohort_width, "an integer of at least 1, or auto")
        rounds = rounds_per_task if isinstance(rounds_per_task, list) else [rounds_per_task]
        if not rounds or any(not isinstance(count, int) or count < 1 for count in rounds):
            valid = "at least 1 round for every task, an integer or a list of them"
            raise ConfigError("schedule.rounds_per_task", rounds_per_task, valid)
        if not clients_per_round > 0 or (isinstance(clients_per_round, float) and clients_per_round > 1):
            raise ConfigError(
                "schedule.clients_per_round", clients_per_round, "an integer of at least 1, or a fraction in (0, 1]"
            )
        check_numbers("schedule", "[0, 1)", clock_spread=clock_spread)
        if clock_spread and evaluate_every:
            valid = "0 with schedule.clock_spread: a client is evaluated where its own tasks end"
            raise ConfigError("schedule.evaluate_every", evaluate_every, valid)
        check_choices("schedule", ("fixed", "poisson"), sampling=sampling)
        if clock_spread and sampling == "poisson":
            raise ConfigError("schedule.sampling", sampling, "fixed with schedule.clock_spread")
        check_numbers("schedule", "[0, 1)", client_dropout=client_dropout)
        check_choices("schedule", ("keys", "shares", "message", "check", "unmasking"), dropout_stage=dropout_stage)
        if dropout_stage != "message" and not client_dropout:
            raise ConfigError("schedule.dropout_stage", dropout_stage, "message without schedule.client_dropout")
        self.rounds_per_task = rounds_per_task
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.cohort_width = cohort_width
        self.evaluate_every = evaluate_every
        self.clock_spread = clock_spread
        self.sampling = sampling
        self.client_dropout, self.dropout_stage = client_dropout, dropout_stage
        self._settled = cohort_width if isinstance(cohort_width, int) else None
        self.most_padding: float | None = None
        self.at_once = 1

    @property
    def width(self) -> int:
        """The cohort width in use.

        Raises:
            RuntimeError: it is ``auto`` and has not been chosen yet.
        """
        if self._settled is None:
            raise RuntimeError("schedule.cohort_width is auto, and no width has been settled yet")
        return self._settled

    def settle_width(self, width: int, most_padding: float | None = None, at_once: int = 1) -> None:
        """Set the cohort width that is used from now on.

        Args:
            width: most clients that are trained side by side.
            most_padding: the share of a cohort's computed samples that may be padding, in [0, 1); None if the engine
                does not compute padding.
            at_once: clients that are computed at the same time, while others of the cohort wait for their turn.
        """
        self._settled, self.most_padding, self.at_once = width, most_padding, at_once

    def with_width(self, width: int) -> Schedule:
        """The same schedule with another cohort width, and without limits to padding and turns."""
        other = copy.copy(self)
        other.cohort_width = width
        other.settle_width(width)
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

    def sample_size(self, present: int) -> int:
        """Clients in a round of a task that ``present`` clients hold, if their number is fixed."""
        wanted = self.clients_per_round
        return max(1, round(wanted * present)) if isinstance(wanted, float) else min(wanted, present)

    def num_dropouts(self, clients: int) -> int:
        """Number of clients that drop out of ``clients`` clients."""
        return max(0, min(round(self.client_dropout * clients), clients - 1))

    def bind(
        self, eligible: Sequence[np.ndarray], seed: int, members: Callable[[], Sequence[np.ndarray]] | None = None
    ) -> BoundSchedule:
        """The schedule of one experiment.

        Args:
            eligible: per task, the ids of the clients that hold it, ascending; or that may hold it, with ``members``.
            seed: the run's seed.
            members: function that returns the clients that hold each task, if they are not known before the data are
                read; a round then has fewer clients than ``clients_per_round`` if fewer hold the task.

        Raises:
            ConfigError: a round needs more clients than hold the task, or may hold it; ``client_dropout`` is so small
                that no client would drop out of any round; or clients have their own clocks, but do not all hold every
                task, or would all spend the same number of rounds on every task.
        """
        holders = [len(clients) for clients in eligible]
        fewest, task = min((count, task) for task, count in enumerate(holders))
        wanted = self.clients_per_round
        if isinstance(wanted, int) and wanted > fewest:
            valid = f"at most {fewest}, the number of clients that hold task {task}, or a fraction in (0, 1]"
            raise ConfigError("schedule.clients_per_round", wanted, valid)
        largest = max(holders) if self.sampling == "poisson" else self.sample_size(max(holders))
        if self.client_dropout and not self.num_dropouts(largest):
            more = f", or more than {0.5 / largest:.3g}" if largest > 1 else ""
            valid = f"0{more}: nobody would drop out of a round of {largest} client(s), of which one always stays"
            raise ConfigError("schedule.client_dropout", self.client_dropout, valid)
        clocks = None
        if self.clock_spread:
            if any(not np.array_equal(own, eligible[0]) for own in eligible):
                valid = "one in which every client holds every task, with schedule.clock_spread"
                raise ConfigError("data.participation", "clients that hold some of the tasks", valid)
            rounds = self.rounds(len(eligible))
            if not can_differ(rounds, self.clock_spread):
                least = f", or at least 1/{max(rounds)}: rounds are whole ones" if max(rounds) > 1 else ""
                valid = f"0{least}, and with rounds_per_task = {self.rounds_per_task} every client would have as many"
                raise ConfigError("schedule.clock_spread", self.clock_spread, valid)
            clocks = rounds_of_clients(rounds, self.clock_spread, int(eligible[0][-1]) + 1, seed)
        return BoundSchedule(self, eligible, seed, clocks, members)


class BoundSchedule:
    """:class:`Schedule` for known tasks and clients. Plans of rounds are pure functions of (seed, round).

    Args:
        settings: the schedule.
        eligible, seed, members: as for :meth:`Schedule.bind`.
        clocks: ``[C, T]`` rounds of each client's tasks, each at least 1; None if all change tasks together.

    Attributes:
        ends_after: rounds after which the run ends early and is evaluated; None if it goes on to its last round.
    """

    def __init__(
        self,
        settings: Schedule,
        eligible: Sequence[np.ndarray],
        seed: int,
        clocks: np.ndarray | None = None,
        members: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> None:
        self.settings, self.seed = settings, seed
        self._eligible, self._find_members = eligible, members
        self._own_ends = None if clocks is None else np.cumsum(clocks, axis=1)
        if self._own_ends is None:
            self._ends = np.cumsum(settings.rounds(len(eligible)))
        else:
            self._ends = self._own_ends[eligible[0]].max(0)
        self.num_tasks = len(eligible)
        self.num_rounds = int(self._ends[-1])
        self.ends_after: int | None = None
        self._last: RoundPlan | None = None
        self._dropouts: tuple[int, frozenset[int]] = (-1, frozenset())

    @cached_property
    def members(self) -> Sequence[np.ndarray]:
        """Per task, the ids of the clients that hold it, ascending."""
        return self._eligible if self._find_members is None else self._find_members()

    @property
    def client_clocks(self) -> bool:
        """Whether clients have their own clocks, that is, do not change tasks together."""
        return self._own_ends is not None

    @cached_property
    def most_clients(self) -> int:
        """The greatest number of clients in any round."""
        if self.settings.sampling == "poisson":
            return max(1, *(len(self._plan(round).clients) for round in range(self.num_rounds)))
        return max(self.settings.sample_size(len(self.members[task])) for task in range(self.num_tasks))

    def sampling_rate(self, round: int) -> float | None:
        """The probability with which each of the clients :meth:`present` joins a round, independently of the others;
        None if their number is fixed."""
        if self.settings.sampling == "fixed":
            return None
        wanted, present = self.settings.clients_per_round, len(self.present(round))
        return wanted if isinstance(wanted, float) else min(wanted, present) / present

    def expected_clients(self, round: int) -> float:
        """The expected number of clients in a round, which does not depend on the clients drawn."""
        rate, present = self.sampling_rate(round), len(self.present(round))
        return float(self.settings.sample_size(present)) if rate is None else rate * present

    def dropouts(self, round: int) -> frozenset[int]:
        """The clients that drop out in a round, sampled ones and others; the same in every call."""
        if self.settings.client_dropout and self._dropouts[0] != round:
            sampled = np.array(self.round(round).clients, dtype=np.int64)
            generator, found = numpy_generator(self.seed, "drop out", round), []
            for clients in (sampled, np.setdiff1d(self._everybody, sampled)):
                found += generator.permutation(clients)[: self.settings.num_dropouts(len(clients))].tolist()
            self._dropouts = (round, frozenset(found))
        return self._dropouts[1]

    @cached_property
    def _everybody(self) -> np.ndarray:
        return np.unique(np.concatenate([np.asarray(clients) for clients in self.members]))

    def next_with_clients(self, round: int) -> int | None:
        """The first round, from ``round`` on, that has a client; None if there is none."""
        return next((later for later in range(round, self.num_rounds) if self.round(later).clients), None)

    def rounds_of(self, task: int) -> int:
        """Number of rounds of a task."""
        return self._end(task) - self._end(task - 1)

    def task_of(self, round: int) -> int:
        """Task of a round, both from 0."""
        if not 0 <= round < self.num_rounds:
            raise IndexError(f"round {round} is outside 0..{self.num_rounds - 1}")
        return int(np.searchsorted(self._ends, round, side="right"))

    # A client's own clock.

    def task_at(self, round: int, client: int) -> int:
        """A client's task in a round; its last task after it has finished all."""
        if self._own_ends is None:
            return self.task_of(round)
        return min(int(np.searchsorted(self._own_ends[client], round, side="right")), self.num_tasks - 1)

    def began(self, task: int, client: int) -> int:
        """The first round of a client's task."""
        return self._end(task - 1, client)

    def due(self, plan: RoundPlan) -> list[int]:
        """The clients, sampled or not, whose current task ends with a round."""
        if self._own_ends is None:
            return self.members[plan.task].tolist() if plan.last_of_task else []
        members = self.members[0]
        due: list[int] = members[(self._own_ends[members] == plan.round + 1).any(1)].tolist()
        return due

    def _end(self, task: int, client: int | None = None) -> int:
        """The round after a task's last one; 0 of task -1."""
        if task < 0:
            return 0
        return int(self._ends[task] if client is None or self._own_ends is None else self._own_ends[client, task])

    # Plans.

    def present(self, round: int) -> np.ndarray:
        """``[m]`` ascending ids of the clients that a round samples from: those that hold its task or, with their own
        clocks, have not finished all of their tasks."""
        present = self.members[self.task_of(round)]
        return present if self._own_ends is None else present[self._own_ends[present, -1] > round]

    def round(self, round: int) -> RoundPlan:
        """The plan of a round; the same in every call."""
        if self._last is None or self._last.round != round:  # cached, because the running round is requested often
            self._last = self._plan(round)
        return self._last

    def _plan(self, round: int) -> RoundPlan:
        task, present = self.task_of(round), self.present(round)
        generator = numpy_generator(self.seed, "sample clients", round)
        rate = self.sampling_rate(round)
        if rate is None:
            chosen = generator.choice(present, size=self.settings.sample_size(len(present)), replace=False)
        else:
            chosen = present[generator.random(len(present)) < rate]
        clients = tuple(np.sort(chosen).tolist())
        return RoundPlan(
            round=round,
            task=task,
            round_in_task=round - self._end(task - 1),
            clients=clients,
            last_of_task=round + 1 == self._end(task),
            groups=() if self._own_ends is None else self._groups(round, clients),
        )

    def _groups(self, round: int, clients: tuple[int, ...]) -> tuple[RoundPlan, ...]:
        """A round's clients, grouped by task, by the round in which they began it, and by whether it ends now."""
        found: dict[tuple[int, int, bool], list[int]] = {}
        for client in clients:
            task = self.task_at(round, client)
            last = round + 1 == self._end(task, client)
            found.setdefault((task, self.began(task, client), last), []).append(client)
        return tuple(
            RoundPlan(round, task, round - began, tuple(own), last)
            for (task, began, last), own in sorted(found.items())
        )

    def evaluates_after(self, plan: RoundPlan) -> bool:
        """Whether any model is evaluated after this round."""
        every = self.settings.evaluate_every
        if self._own_ends is not None:
            return bool(self.due(plan))
        return (
            plan.last_of_task
            or plan.round + 1 == self.ends_after
            or (every > 0 and (plan.round_in_task + 1) % every == 0)
        )

    def row_is_whole(self, plan: RoundPlan) -> bool:
        """Whether, after this round, all clients have been evaluated after ``plan.task``."""
        return plan.last_of_task if self._own_ends is not None else self.evaluates_after(plan)
