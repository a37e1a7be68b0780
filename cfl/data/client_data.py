"""Assigns training samples to clients and tasks, and says which samples a client trains on in each task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np

from cfl.data.enough_samples import check_every_client_trains, holders
from cfl.data.exposure import (
    EXPOSURES,
    ONE_AT_A_TIME,
    OWN_PACE,
    STREAMING,
    Exposure,
    GlobalIndex,
    Handles,
    exposed,
    portions,
    samples_by_round,
    unreached,
)
from cfl.data.learned_tasks import dealt_to_learners, learners_of, one_by_one
from cfl.data.participation import Participation, members_checked
from cfl.data.partitions import IID, Partition, client_indices
from cfl.data.partitions.client_shares import ClientShares, share_sizes
from cfl.data.schedule import RoundPlan, Schedule
from cfl.data.sequences import TaskSequences
from cfl.data.streams import Stream
from cfl.data.streams.checks import check_stream, loaded_tasks
from cfl.data.streams.of_clients import stream_of_clients
from cfl.data.task_handles import TaskRef, unwrap_task
from cfl.data.types import Task
from cfl.data.validation import set_aside
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers

_BYTES_PER_CLIENT = 32
"""Bytes for each client and task: the client's id and the place of its first sample in the lists of shares."""


class ClientDataAssignment:
    """The samples of a stream's tasks, dealt to clients. Files are read on first use.

    It is the first of three parts of one class. :class:`cfl.data.client_inputs.ClientInputs` adds the samples as
    network inputs; :class:`cfl.data.datamodule.FederatedDataModule` adds rounds and Lightning's hooks, and explains the
    arguments.

    Raises:
        ConfigError: a value outside its range, or two that contradict each other.
    """

    def __init__(
        self,
        stream: Stream,
        schedule: Schedule,
        partition: Partition,
        participation: Participation,
        num_clients: int,
        repartition: bool,
        exposure: Exposure,
        portion: int | float | None,
        sequences: TaskSequences | None,
        validation: float,
        root: Path,
        seed: int,
    ) -> None:
        check_integers("data", 1, num_clients=num_clients)
        check_stream(stream)
        needed = _BYTES_PER_CLIENT * num_clients * stream.num_tasks
        require_memory("data.num_clients", num_clients, needed, "fewer clients")
        self._given = self.stream = stream
        self.schedule = schedule
        self.partition = partition
        self.participation = participation
        self.num_clients = num_clients
        self.repartition = repartition
        self.exposure: Exposure = exposure
        self.portion = portion
        self.sequences = sequences
        self.validation = validation
        self.root = root
        self.seed = seed
        self._refuse_contradictions()
        self._drawn: np.ndarray | None = None
        """``[C, T]`` int64, the given stream's number of each client's t-th task; None unless outputs go by place."""
        if sequences is not None and sequences.outputs == "place":
            self._drawn = sequences.of_clients(num_clients, stream.num_tasks, seed)
            self.stream = stream_of_clients(stream, self._drawn)
        elif sequences is not None and sequences.length > stream.num_tasks:
            _ = self.order  # raises ConfigError before anything is built for so many tasks
        self._exposed: tuple[int, Mapping[int, np.ndarray]] | None = None
        self._closing: RoundPlan | None = None

    def _refuse_contradictions(self) -> None:
        """Refuse an unknown exposure, and settings that do not go together with it or with sequences."""
        exposure, portion, sequences = self.exposure, self.portion, self.sequences
        check_choices("data", EXPOSURES, exposure=exposure)
        if portion is not None and exposure in STREAMING:
            check_numbers("data", "(0, inf)", portion=portion)
        elif portion is not None and (exposure != "asynchronous" or not isinstance(portion, int) or portion < 1):
            valid = "a whole number of samples with data.exposure: asynchronous, seconds with streaming, else null"
            raise ConfigError("data.portion", portion, valid)
        if sequences is not None and exposure in OWN_PACE:
            raise ConfigError("data.exposure", exposure, "another exposure with data.sequences")
        if self.schedule.clock_spread and exposure not in ONE_AT_A_TIME:
            raise ConfigError("data.exposure", exposure, f"{' or '.join(ONE_AT_A_TIME)} with schedule.clock_spread")
        if sequences is not None and not self.repartition:
            raise ConfigError("data.repartition", self.repartition, "true with data.sequences")
        shares_samples = sequences is not None and sequences.split == "whole"
        if shares_samples and not isinstance(self.partition, IID):
            valid = "IID with data.sequences.split: whole, under which clients have all samples of their tasks"
            raise ConfigError("data.partition", self.partition.name, valid)
        check_numbers("data", "[0, 1)", validation=self.validation)
        if shares_samples and self.validation:
            valid = "0 with data.sequences.split: whole, under which others train on what a client would set aside"
            raise ConfigError("data.validation", self.validation, valid)
        if self.participation.min_samples and (self.schedule.clock_spread or exposure in OWN_PACE):
            valid = f"another one with schedule.clock_spread or data.exposure: {' or '.join(OWN_PACE)}"
            raise ConfigError("data.participation", self.participation.name, valid)

    @property
    def num_tasks(self) -> int:
        """Number of tasks T that a client learns."""
        return self.stream.num_tasks if self.sequences is None else self.sequences.length

    @cached_property
    def order(self) -> np.ndarray | None:
        """``[C, T]`` int64, the stream's number of each client's t-th task; None if all clients follow the stream."""
        if self.sequences is None:
            return None
        if self._drawn is not None:
            return np.arange(self._drawn.size).reshape(self._drawn.shape)
        return self.sequences.of_clients(self.num_clients, self.stream.num_tasks, self.seed)

    def stream_task(self, task: int, client: int) -> int:
        """The stream's number of a client's task."""
        return task if self.order is None else int(self.order[client, task])

    def learners(self, stream_task: int) -> list[tuple[int, int]]:
        """Ascending pairs (client, number of the task in its sequence) for all clients that learn a stream's task."""
        if self.order is None:
            return [(client, stream_task) for client in self.members[stream_task].tolist()]
        return self._learners[stream_task]

    @cached_property
    def _learners(self) -> list[list[tuple[int, int]]]:
        assert self.order is not None
        return learners_of(self.order, self.stream.num_tasks, self.members)

    # Assignment of samples.

    @cached_property
    def eligible(self) -> list[np.ndarray]:
        """Per task, the ids of the clients to whom its samples are dealt, ascending."""
        return members_checked(self.participation, self.num_clients, self.num_tasks, self.seed)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """Per task, the ids of the clients that hold it, ascending. Reads files if only clients with samples take part.

        Raises:
            ConfigError: ``data.participation``: no client has enough samples of a task.
        """
        enough = self.participation.min_samples
        if not enough:
            return self.eligible
        found = [holders(held, self.schedule, enough) for held in self._held]
        for task, clients in enumerate(found):
            if not len(clients):
                value = f"{self.participation.name}: no client has {enough} samples, and a batch, of task {task}"
                valid = "fewer clients, a smaller min_samples, or a smaller batch_size with drop_last"
                raise ConfigError("data.participation", value, valid)
        return found

    @cached_property
    def tasks(self) -> list[Task]:
        """The tasks of :attr:`stream` with their data. Reads files on first use."""
        given = self._given_tasks
        return given if self._drawn is None else [given[task] for task in self._drawn.ravel().tolist()]

    @cached_property
    def _given_tasks(self) -> list[Task]:
        """The tasks of the stream that was given."""
        return loaded_tasks(self._given, self.root, self.seed)

    @property
    def dealt(self) -> Sequence[Mapping[int, np.ndarray]]:
        """Per task of the stream, client -> indices into its training set, without :attr:`validation_dealt`."""
        return self._cut_deal[0]

    @property
    def dealt_to_learners(self) -> Sequence[Mapping[int, np.ndarray]]:
        """As :attr:`dealt`, of the clients that learn a task; others may have been dealt a share that is not used."""
        learners = (np.array([c for c, _ in self.learners(t)], dtype=np.int64) for t in range(self.stream.num_tasks))
        return [_only(dealt, clients) for dealt, clients in zip(self.dealt, learners, strict=True)]

    @property
    def validation_dealt(self) -> Sequence[Mapping[int, np.ndarray]]:
        """Per task of the stream, client -> indices of its validation samples in the task's training set.

        Mappings are empty if no samples are set aside."""
        return self._cut_deal[1]

    @cached_property
    def _cut_deal(self) -> tuple[Sequence[Mapping[int, np.ndarray]], Sequence[Mapping[int, np.ndarray]]]:
        whole = self._whole_deal()
        if self.validation == 0:
            return whole, [{} for _ in whole]
        train, aside = set_aside(whole, self.validation, self.seed)
        if not any(share_sizes(of_task).any() for of_task in aside):
            valid = "0, or fewer clients: none has two samples of a task, of which one could be set aside"
            raise ConfigError("data.validation", self.validation, valid)
        return train, aside

    def _whole_deal(self) -> Sequence[Mapping[int, np.ndarray]]:
        drawn = self.order if self._drawn is None else self._drawn
        if self.sequences is None or drawn is None:
            dealt_to, clients = self.eligible, self.num_clients
            return client_indices(self.tasks, self.partition, dealt_to, clients, self.seed, self.repartition)
        # Deal by the tasks of the given stream, so that data.sequences.outputs does not change any client's samples.
        # Only those that data.validation sets aside change with it, because these draws are keyed by the task's number.
        split = self.sequences.split
        dealt = dealt_to_learners(self._given_tasks, self.partition, drawn, self.eligible, split, self.seed)
        return dealt if self._drawn is None else one_by_one(dealt, drawn)

    @cached_property
    def indices(self) -> Sequence[Mapping[int, np.ndarray]]:
        """Per task, client -> indices into the task's training set; global indices if tasks differ by client."""
        found = self._held
        if self.participation.min_samples:
            found = [_only(held, members) for held, members in zip(found, self.members, strict=True)]
        if self.exposure not in OWN_PACE:  # OWN_PACE: every period or round is checked instead
            check_every_client_trains(found, self.schedule)
        return found

    @cached_property
    def _held(self) -> Sequence[Mapping[int, np.ndarray]]:
        """As :attr:`indices`, for all :attr:`eligible` clients, which may have no samples."""
        if self.order is None:
            return self.dealt
        return [
            {client: self._global_index_dealt(self.stream_task(task, client), client) for client in clients.tolist()}
            for task, clients in enumerate(self.eligible)
        ]

    @cached_property
    def global_index(self) -> GlobalIndex:
        """Numbers the training samples of all tasks."""
        return GlobalIndex([len(task.train) for task in self.tasks])

    @cached_property
    def handles(self) -> Handles:
        """Handles of :attr:`global_index`, which do not show a sample's task."""
        return Handles(int(self.global_index.starts[-1]), self.seed)

    @property
    def by_global_index(self) -> bool:
        """Whether local steps use :attr:`global_index` instead of indices into a task's training set."""
        return self.exposure not in ONE_AT_A_TIME or self.order is not None

    def handles_in_steps(self, task: int) -> Handles:
        """:attr:`handles` of the sample indices that the local steps of a task use."""
        return self.handles if self.by_global_index else self.handles.offset_by(int(self.global_index.starts[task]))

    def _global_index_dealt(self, stream_task: int, client: int) -> np.ndarray:
        return self.global_index.of(stream_task, self.dealt[stream_task][client])

    def client_global_index(self, task: int, client: int) -> np.ndarray:
        """Ascending :attr:`global_index` of a client's samples of a task; empty if it does not learn the task."""
        if client not in self.indices[task]:
            return np.zeros(0, dtype=np.int64)
        return self._global_index_dealt(self.stream_task(task, client), client)

    def global_index_trained_on(self, task: TaskRef, client: int) -> np.ndarray:
        """:attr:`global_index` of the samples that a client trains on during a task, ascending within each task."""
        number = unwrap_task(task)
        if self.exposure in ("cumulative", "joint"):  # for this client only, because trained_on computes all clients
            return exposed(number, self.exposure, self._global_index_held([client]))[client]
        held = self.trained_on(number)[client]
        return held if self.by_global_index else self.global_index.of(number, held)

    def validation_indices(self, task: TaskRef, client: int) -> np.ndarray:
        """A client's validation samples of its task: indices into the training set of the stream's task."""
        nothing = np.zeros(0, dtype=np.int64)
        return self.validation_dealt[self.stream_task(unwrap_task(task), client)].get(client, nothing)

    def trained_on(self, task: int) -> Mapping[int, np.ndarray]:
        """Client -> samples that it trains on during a task; with a stream in time, during the running round.

        They are global indices with :attr:`by_global_index`, else indices into the task's training set.
        """
        if self.exposure in ONE_AT_A_TIME:
            return self.indices[task]
        if self.exposure == "asynchronous":
            return self._portions[task]
        if self.exposure in STREAMING:
            round = self.next_round if self._closing is None else self._closing.round
            return self._met_in(min(round, self.num_rounds - 1))
        if self._exposed is None or self._exposed[0] != task:
            self._exposed = task, exposed(task, self.exposure, self._global_index_held(range(self.num_clients)))
        return self._exposed[1]

    @cached_property
    def most_trained_on(self) -> int:
        """The greatest number of samples that a client trains on in one round."""
        if self.exposure == "streaming":
            every: Iterable[Mapping[int, np.ndarray]] = self._portions
        elif self.exposure == "streaming-cumulative":
            every = [self._met_in(self.num_rounds - 1)]
        else:
            every = map(self.trained_on, range(self.num_tasks))
        return max(int(share_sizes(trained).max()) for trained in every)

    @contextmanager
    def closing(self, plan: RoundPlan) -> Iterator[None]:
        """Within the context, the running round of :meth:`trained_on` is that of ``plan``, although it is counted."""
        self._closing = plan
        try:
            yield
        finally:
            self._closing = None

    def trained_in(self, plan: RoundPlan) -> Mapping[int, np.ndarray]:
        """:meth:`trained_on` for the current task of each of a round's clients; may include other clients."""
        if self.exposure in STREAMING:
            return self._met_in(plan.round)
        if not plan.groups:
            return self.trained_on(plan.task)
        return {client: self.trained_on(part.task)[client] for part in plan.parts for client in part.clients}

    def _global_index_held(self, clients: Iterable[int]) -> list[dict[int, np.ndarray]]:
        clients = list(clients)
        return [
            {client: self.client_global_index(task, client) for client in clients if client in self.indices[task]}
            for task in range(self.num_tasks)
        ]

    def unreached_tasks(self) -> list[int]:
        """Tasks that no client trains on, because all portions (``data.portion``) end before them."""
        if not self.portion:
            return []
        return unreached(self._global_index_held(range(self.num_clients)), self._portions)

    def missed_samples(self) -> int:
        """Training samples of a stream in time that can never be trained on, because their clients' clocks run from the
        first round on, also in rounds of tasks in which they take no part."""
        if self.exposure not in STREAMING or all(len(clients) == self.num_clients for clients in self.members):
            return 0
        task_of = np.repeat(np.arange(self.num_tasks), self.schedule.rounds(self.num_tasks))
        missed = 0
        later: set[int] = set()  # clients that take part in a later round, by which they still have what they have met
        for met, task in zip(reversed(self._portions), reversed(task_of.tolist()), strict=True):
            present = {*self.members[task].tolist()}
            later |= present
            trains = present if self.exposure == "streaming" else later
            missed += sum(len(samples) for client, samples in met.items() if client not in trains)
        return missed

    @cached_property
    def _portions(self) -> list[dict[int, np.ndarray]]:
        """Client -> samples that it trains on at its own pace, per task (asynchronous) or round (streaming)."""
        held = self._global_index_held(range(self.num_clients))
        if self.exposure == "asynchronous":
            size = None if self.portion is None else int(self.portion)  # __init__ has checked that it is whole
            found = portions(held, self.seed, size)
            check_every_client_trains(found, self.schedule)
            return found
        lasting = [
            np.ones(len(task.train)) if task.train.seconds is None else task.train.seconds.numpy()
            for task in self.tasks
        ]
        found = samples_by_round(held, np.concatenate(lasting), self.num_rounds, self.portion)
        # With streaming-cumulative a client's samples grow from round to round: only the first round can have too few.
        check_every_client_trains(found if self.exposure == "streaming" else found[:1], self.schedule, "round")
        return found

    def _met_in(self, round: int) -> Mapping[int, np.ndarray]:
        """Client -> samples that it trains on in a round: the round's own, or those of all rounds so far."""
        if self.exposure == "streaming":
            return self._portions[round]
        return _SoFar(self._portions[: round + 1])

    # Rounds.

    @property
    @abstractmethod
    def next_round(self) -> int:
        """The running or the next round."""

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """Communication rounds over all tasks."""


class _SoFar(Mapping[int, np.ndarray]):
    """Client -> its samples of several rounds, put together for the clients that are asked for."""

    def __init__(self, rounds: Sequence[Mapping[int, np.ndarray]]) -> None:
        self._rounds = rounds

    def __getitem__(self, client: int) -> np.ndarray:
        return np.concatenate([of_round[client] for of_round in self._rounds])

    def __iter__(self) -> Iterator[int]:
        return iter(self._rounds[0])

    def __len__(self) -> int:
        return len(self._rounds[0])


def _only(held: Mapping[int, np.ndarray], clients: np.ndarray) -> Mapping[int, np.ndarray]:
    if isinstance(held, ClientShares):
        return held.only(clients)
    return {client: held[client] for client in clients.tolist()}
