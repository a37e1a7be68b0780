"""The Lightning data module: loaders per task and client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from cfl.data.augmentation import Augmentation
from cfl.data.client_data import ClientDataAssignment
from cfl.data.cohort_dealing import deal_clients, local_steps
from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.digest import check_digests, data_digests
from cfl.data.evaluation import EvaluationBatch, EvaluationLoader, NothingToEvaluate
from cfl.data.exposure import OWN_PACE, STREAMING, UNANNOUNCED, Exposure
from cfl.data.inputs import Inputs, Moment
from cfl.data.participation import AllClients, Participation
from cfl.data.partitions import IID, Partition
from cfl.data.round_loader import RoundLoader
from cfl.data.scenarios import OutputMap, Scenario, output_map, require_binary
from cfl.data.schedule import BoundSchedule, Schedule
from cfl.data.sequences import TaskSequences
from cfl.data.sources.base import Source
from cfl.data.sources.root import data_root
from cfl.data.streams import Stream
from cfl.data.task_handles import TaskHandles, TaskRef, unwrap_task, unwrap_tasks
from cfl.data.types import Task
from cfl.metrics.measure import MEASURES, Measure, measure_of
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import check_choices, check_integers

_BYTES_PER_EPOCH = 200
"""Of the random numbers of a client's local epoch, at least."""


class CountsRounds(Protocol):
    """An object that counts rounds: the federation."""

    round: int


class FederatedDataModule(ClientDataAssignment, LightningDataModule):
    """Deals a task stream to clients and serves their samples round by round.

    Args:
        stream: the tasks in their order, and the data set(s) they are cut from.
        schedule: rounds, sampling and local work (in YAML the top-level key ``schedule``).
        partition: how one task's samples are dealt to the clients that hold it; IID if not given.
        participation: which clients hold which task; all clients hold all tasks if not given.
        num_clients: number of clients C.
        repartition: deal every task anew. If false, all tasks are dealt together: tasks over the same samples have the
            same partition, and of different tasks a client may have many samples of one and few of another.
        scenario: ``task``, ``class`` or ``domain`` incremental; ``density``: labels are not used, samples are binary
            and the network estimates their density; ``regression``: labels are numbers, which the network predicts; or
            ``detection``: labels are boxes, which it finds. null takes the latter two by the labels, else ``domain`` if
            a label means the same in every task (permuted, rotated), else ``task``.
        class_loss: the training loss of a class-incremental run is over ``all`` classes of the stream, over those
            ``seen`` so far, also for replayed samples of earlier tasks, or over those of a sample's ``own`` task, as in
            task-incremental runs. With ``seen``, tests choose among these classes, since nothing has been learned about
            the others. With ``exposure: joint`` all classes are seen from the first round on. Exposures that tell
            methods no boundaries, and all other scenarios, allow ``all`` only.
        root: folder with the data sets' files; null takes the environment variable CFL_DATA_ROOT, else ``data``.
        eval_batch_size: test samples per evaluation step. Affects results only of networks that normalise with the test
            batch's own statistics.
        eval_shuffle: evaluate each test set in a random order, the same in every round of a run, instead of its stored
            one. Affects the same networks: a stored order is often one class after another.
        exposure: samples that clients train on during a task. ``sequential``: those of the task. ``unannounced``: the
            same, but methods are told neither tasks nor where they end. ``cumulative``: those of all tasks so far.
            ``joint``: those of all tasks of the stream from the first round on. The latter two are upper bounds of
            continual learning. ``asynchronous``: each client goes through its samples in the order of
            the tasks at its own pace (:func:`cfl.data.exposure.portions`), so that there are no common task boundaries;
            the schedule's tasks are then periods. ``streaming``: each client goes through its samples in the order of
            the tasks and of the data set, and every round has the next seconds of them
            (:func:`cfl.data.exposure.stretches`); a client that is not sampled misses those of the round. The
            schedule's tasks then only say when rows of the matrix end. ``streaming-cumulative``: the same with a memory
            for all that a client has met, the upper bound.
        portion: asynchronous: samples per client and period. streaming: seconds per client and round; a sample lasts as
            long as the data set says, else a second. null cuts each client's samples, or its time, into equal parts.
        sequences: the stream's tasks that each client learns, and their order; null: all tasks, in the stream's order.
            With sequences, "task t" is every client's own t-th task, except for images and outputs
            (:class:`cfl.data.sequences.TaskSequences`).
        validation: share of each client's training samples of every task that is set aside, in [0, 1)
            (:func:`cfl.data.validation.set_aside`). They are used neither in training nor in memories and extra
            communication rounds; methods can validate with them (:meth:`validation_batches`).
        evaluate_on: samples that accuracies (or likelihoods) are computed on: the ``test`` sets or, for choosing
            settings, ``validation``: the samples that a task's clients have set aside and nothing trains on.
        augmentation: random change of the images in local training, none if not given. Tests and extra communication
            rounds use unchanged images, except those from a replay buffer.
        seed: the run's seed (in YAML ``seed_everything``).
    """

    def __init__(
        self,
        stream: Stream,
        schedule: Schedule,
        partition: Partition | None = None,
        participation: Participation | None = None,
        num_clients: int = 20,
        repartition: bool = True,
        scenario: Scenario | None = None,
        class_loss: str = "all",
        root: str | None = None,
        eval_batch_size: int = 1000,
        eval_shuffle: bool = False,
        augmentation: Augmentation | None = None,
        exposure: Exposure = "sequential",
        portion: int | float | None = None,
        sequences: TaskSequences | None = None,
        validation: float = 0.0,
        evaluate_on: Literal["test", "validation"] = "test",
        seed: int = 0,
    ) -> None:
        LightningDataModule.__init__(self)
        ClientDataAssignment.__init__(
            self,
            stream,
            schedule,
            IID() if partition is None else partition,
            AllClients() if participation is None else participation,
            num_clients,
            repartition,
            exposure,
            portion,
            sequences,
            validation,
            data_root(root),
            seed,
        )
        check_integers("data", 1, eval_batch_size=eval_batch_size)
        check_choices("data", ("test", "validation"), evaluate_on=evaluate_on)
        if evaluate_on == "validation" and not validation:
            raise ConfigError("data.validation", validation, "above 0 with data.evaluate_on: validation")
        self.scenario: Scenario = scenario or _scenario_by_labels(stream)
        if self.measure.targets not in ("inputs", stream.targets):
            known = " or ".join(name for measure in _measures_of(stream) for name in measure.scenarios)
            raise ConfigError("data.scenario", scenario, f"{known}, since labels are {stream.targets}")
        if augmentation is not None and stream.targets == "boxes" and not augmentation.moves_boxes:
            valid = "null or one that moves boxes with their images, such as CropFlip"
            raise ConfigError("data.augmentation", type(augmentation).__name__, valid)
        self.measure.require()
        self.class_loss = class_loss
        self._check_class_loss()
        self._require_choices()
        self.eval_batch_size = eval_batch_size
        self.eval_shuffle = eval_shuffle
        self.evaluate_on = evaluate_on
        self.augmentation = augmentation
        self._counter: CountsRounds | None = None
        self.all_batches_everywhere = False
        self.steps_per_block = 1
        # A process without a share of one task's test set may have one of another's.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._unread: Exception | None = None
        self._idle_named = False
        self._unreached_named = False

    def _check_class_loss(self) -> None:
        """Refuse losses over some of the classes where the run is not class-incremental or tells no boundaries."""
        value, exposure = self.class_loss, self.exposure
        check_choices("data", ("all", "seen", "own"), class_loss=value)
        if value == "all":
            return
        valid = None
        if exposure in UNANNOUNCED:
            valid = f"all with data.exposure: {exposure}: which classes are in the loss would tell where tasks end"
        elif self.sequences is not None and value == "seen":
            valid = "all with data.sequences: which classes a client has seen does not follow from the stream's order"
        elif self.scenario != "class":
            how = "data.scenario: class with data.stream: ClassSplit, for example"
            valid = f"all with data.scenario: {self.scenario}; {value} is for class-incremental streams ({how})"
        if valid is not None:
            raise ConfigError("data.class_loss", value, valid)

    def _require_choices(self) -> None:
        """Refuse streams in which every answer is right, because nothing competes with it."""
        classes = self.stream.classes_per_task
        if self.scenario == "task" and 1 in classes:
            valid = f"class, or streams with at least 2 classes in every task: task {classes.index(1)} has 1"
            raise ConfigError("data.scenario", "task", f"{valid}, and so every answer would be right")
        if self.scenario in ("class", "domain") and self.num_outputs == 1:
            raise ConfigError("data.stream", self.stream.name, "one with at least 2 classes")

    # The current round.

    def follow(self, counter: CountsRounds) -> None:
        """Set the object from which the current round is read."""
        self._counter = counter

    @property
    def next_round(self) -> int:
        """The running or the next round; 0 before :meth:`follow`."""
        return 0 if self._counter is None else self._counter.round

    # Known without reading a file, so that a network can be sized and a schedule checked before loading.

    @cached_property
    def measure(self) -> Measure:
        """What clients are trained and evaluated by."""
        return measure_of(self.scenario).on(self.stream.shape)

    @cached_property
    def outputs(self) -> OutputMap:
        """Maps the tasks' classes to the network's outputs."""
        variables = self.measure.num_outputs(self.stream.shape, self.stream.classes_per_task)
        class_loss = "all" if self.exposure == "joint" and self.class_loss == "seen" else self.class_loss
        return output_map(self.stream.classes_per_task, self.scenario, class_loss, variables)  # type: ignore[arg-type]

    @property
    def num_outputs(self) -> int:
        """Size of the network's output layer."""
        return self.outputs.num_outputs

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of the network's input."""
        return self.stream.shape

    @cached_property
    def rounds(self) -> BoundSchedule:
        """The schedule for this stream and these clients. Files are read only when clients are needed."""
        if not self.participation.min_samples:
            return self.schedule.bind(self.members, self.seed)
        return self.schedule.bind(_Later(self.num_tasks, lambda: self.members), self.seed, self.eligible)

    @property
    def num_rounds(self) -> int:
        """Communication rounds over all tasks: Lightning's ``max_epochs``."""
        return self.rounds.num_rounds

    # Reading files.

    @cached_property
    def evaluated(self) -> list[Task]:
        """The tasks with the samples they are evaluated on as their test sets.

        Raises:
            ConfigError: ``data.stream``: a task has no test sample; ``data.validation``: a task has no validation
                sample that is not trained on.
        """
        if self.evaluate_on == "test":
            for number, task in enumerate(self.tasks):
                if not len(task.test):
                    value = f"{type(self.stream).__name__}, whose task {number} has no test sample"
                    raise ConfigError("data.stream", value, "test samples of every task's classes")
            return self.tasks
        found = []
        for number, (task, train, aside) in enumerate(zip(self.tasks, self.dealt, self.validation_dealt, strict=True)):
            trained_on = np.concatenate([*train.values(), np.zeros(0, dtype=np.int64)])
            held_out = np.setdiff1d(np.concatenate([*aside.values(), np.zeros(0, dtype=np.int64)]), trained_on)
            if not len(held_out):
                valid = f"a larger share: task {number} has no validation sample that is not trained on"
                raise ConfigError("data.validation", self.validation, valid)
            found.append(replace(task, test=task.train.subset(torch.from_numpy(held_out))))
        return found

    def outputs_in_loss(self, task: TaskRef, client: int) -> Tensor | None:
        """``[O]`` bool, the outputs in the training loss of a client's task, or None for all."""
        train = self.outputs.train
        return None if train is None else train[self.stream_task(unwrap_task(task), client)]

    def outputs_in_loss_of(self, samples: Tensor | TaskHandles, task: TaskRef) -> Tensor | None:
        """``[..., O]`` bool, the outputs in the loss of samples of tasks ``[...]`` while ``task`` is trained on, or
        None for all."""
        train, tasks = self.outputs.in_loss_during(unwrap_task(task)), unwrap_tasks(samples)
        return None if train is None else train.to(tasks.device)[tasks]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the stream's ``train`` and ``test`` samples (:mod:`cfl.data.digest`)."""
        return data_digests(self.tasks, self.partition.by_owner, self.exposure in STREAMING)

    def state_dict(self) -> dict[str, Any]:
        """The state of the data module in checkpoints: digests of the samples, and what only files tell of them."""
        return {"digests": self.digests, "files": self.of_files}

    @cached_property
    def of_files(self) -> dict[str, dict[str, Any]]:
        """:meth:`cfl.data.sources.base.Source.kept` of the stream's data sets."""
        found: dict[str, dict[str, Any]] = {}
        for task in range(self.stream.num_tasks):
            source: Any = self.stream.source_of(task)
            while isinstance(source, Source):
                found |= source.kept(self.root)
                source = getattr(source, "source", None)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that these are the samples of the checkpoint's run.

        Raises:
            ConfigError: they differ.
        """
        check_digests(state_dict["digests"], self.digests)

    def prepare_data(self) -> None:
        """Let one process per machine download missing files before all processes read them."""
        if distributed.count() > 1:
            try:
                _ = self.tasks
            except Exception as error:  # the others are waiting; :meth:`setup` raises it
                self._unread = error

    def setup(self, stage: str) -> None:
        """Load, deal and check everything before the first round.

        Raises:
            ConfigError: if the settings cannot work.
            DataFilesMissing: if files are absent and cannot be downloaded.
        """
        if self._unread is not None:
            raise self._unread
        _ = self.rounds
        _ = self.indices
        _ = self.evaluated
        _ = self.inputs  # computed before several threads need it at the same time
        _ = self.of_files
        _ = self.digests  # computed before the first checkpoint, whose time is measured
        if self.measure.targets == "inputs":
            require_binary(self.tasks)
        if self.exposure == "asynchronous":
            _ = self._portions
        if self.exposure in STREAMING:
            _ = self._stretches
        epochs = self.schedule.local_epochs
        needed = _BYTES_PER_EPOCH * epochs * self.rounds.most_clients
        require_memory("schedule.local_epochs", epochs, needed, "fewer")
        self._name_idle_clients()
        self._name_unreached_tasks()

    def _name_idle_clients(self) -> None:
        """Warn about clients that take part in no task; this may be intended, to leave their samples out."""
        idle = np.setdiff1d(np.arange(self.num_clients), np.concatenate(self.members)).tolist()
        if not idle or self._idle_named or distributed.rank():
            return
        self._idle_named = True
        some = ", ".join(map(str, idle[:5])) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        who = f"client {some} takes" if len(idle) == 1 else f"clients {some} take"
        key = f"data.participation = {self.participation.name}"
        warnings.warn(f"{who} part in none of the {self.num_tasks} tasks ({key})", stacklevel=2)

    def _name_unreached_tasks(self) -> None:
        """Warn about tasks that no client reaches: their accuracies would be those of untrained tasks."""
        if self.exposure not in OWN_PACE or self._unreached_named or distributed.rank():
            return
        self._unreached_named = True
        tasks = self.unreached_tasks()
        if tasks:
            some = f"task {tasks[0]}" if len(tasks) == 1 else f"tasks {', '.join(map(str, tasks))}"
            count = self.num_tasks if self.exposure == "asynchronous" else self.num_rounds
            ends = f"{count} portions of data.portion = {self.portion} end before"
            warnings.warn(f"no client trains on {some} (from 0): {ends}", stacklevel=2)

    # Lightning's loaders.

    def own_clients(self, task: int, clients: Sequence[int]) -> list[int]:
        """The clients among these that this process computes, ascending; all of them if there is one process.

        A client of a round belongs to the process that trains it. A client that does not hold the task counts as one
        step.

        Args:
            task: the task whose data they use.
            clients: the same in all processes.
        """
        if distributed.count() == 1:
            return sorted(clients)
        held = self.trained_on(task)
        steps = {client: local_steps(len(held[client]), self.schedule) if client in held else 1 for client in clients}
        return deal_clients(steps, distributed.count())[distributed.rank()]

    def train_dataloader(self) -> RoundLoader:
        """This process's cohort batches of the next round."""
        plan = self.rounds.round(min(self.next_round, self.num_rounds - 1))
        held = self.trained_in(plan)
        share = distributed.rank(), distributed.count()
        return RoundLoader(plan, held, self.schedule, self.seed, *share, block=self.steps_per_block)

    def val_dataloader(self) -> list[EvaluationLoader | NothingToEvaluate]:
        """One loader per task of the stream, seen or not.

        Several processes share the batches of all tasks, unless ``all_batches_everywhere`` is set.
        """
        every = 1 if self.all_batches_everywhere else distributed.count()
        loaders: list[EvaluationLoader | NothingToEvaluate] = []
        before = 0
        for t, task in enumerate(self.evaluated):
            first = (distributed.rank() - before) % every
            loaders.append(EvaluationLoader(t, len(task.test), self.eval_batch_size, first, every))
            before += -(-len(task.test) // self.eval_batch_size)
        if not any(len(loader) for loader in loaders):
            loaders[0] = NothingToEvaluate()
        return loaders

    def test_dataloader(self) -> list[EvaluationLoader | NothingToEvaluate]:
        """The same test sets as :meth:`val_dataloader`; nothing is tuned on them during a fit."""
        return self.val_dataloader()

    # From indices to network inputs, on the device.

    @cached_property
    def inputs(self) -> Inputs:
        """The tasks' samples as network input."""
        return Inputs(self.evaluated, self.input_shape, self.outputs.offsets, self.augmentation, self.seed)

    def gather(self, task: int, index: Tensor, moment: Moment | None = None) -> tuple[Tensor, Tensor]:
        """Training samples of a task: :meth:`cfl.data.inputs.Inputs.of_task` for ``index`` as in :attr:`indices`."""
        if self.order is not None:
            return self._gather_global(index, moment)
        return self.inputs.of_task(task, index, moment)

    def samples_at(
        self,
        places: Tensor,
        moment: Moment | None = None,
        words: Tensor | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor, TaskHandles]:
        """Training samples with :attr:`global_index` ``[...]``: network input and output indices as returned by
        :meth:`cfl.data.inputs.Inputs.of_tasks`, and their tasks."""
        tasks, index = self.global_index.split(places)
        x, y = self.inputs.of_tasks(tasks, index, moment, words, device)
        return x, y, TaskHandles(moved(tasks, y.device))

    def labels_at(self, places: Tensor) -> Tensor:
        """``[n]`` int64 output index of training samples with :attr:`global_index` ``[n]``, without their images."""
        return self.inputs.labels(*self.global_index.split(places))

    def _gather_global(self, places: Tensor, moment: Moment | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`gather`, for :attr:`global_index`."""
        return self.samples_at(places, moment)[:2]

    def on_after_batch_transfer(
        self, batch: CohortBatch | CohortBlock | EvaluationBatch, dataloader_idx: int
    ) -> CohortBatch | CohortBlock | EvaluationBatch:
        """Say where the samples come from (training) or fill them in (evaluation), on the device."""
        # The next round to close is the one that is running.
        if isinstance(batch, CohortBlock):
            return replace(batch, complete=partial(self._in_round, self.next_round))
        if isinstance(batch, CohortBatch):
            return self._in_round(self.next_round, batch)
        if batch.start == batch.stop:
            return batch
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        return self.evaluation_batch(batch, device)

    def _in_round(self, round: int, batch: CohortBatch) -> CohortBatch:
        return self.with_samples(batch, (round, batch.step))

    def with_samples(self, batch: CohortBatch, moment: tuple[int, int] | None) -> CohortBatch:
        """``batch`` with the functions that fetch its samples, see :meth:`gather`, and their handles."""
        handles = partial(self.handles_in_steps, batch.task)  # computed when needed
        if self.by_global_index:
            gather = partial(self._gather_global, moment=moment)
            return replace(batch, gather=gather, tasks_of_own=self.global_index.tasks, handles=handles)
        return replace(batch, gather=partial(self.gather, batch.task, moment=moment), handles=handles)

    def evaluation_batch(self, batch: EvaluationBatch, device: torch.device) -> EvaluationBatch:
        """``batch`` with ``x`` and ``y`` on ``device``."""
        x, y = self.inputs.of_test_set(batch.task, slice(batch.start, batch.stop), device, self.eval_shuffle)
        return replace(batch, x=x, y=y)

    def client_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training samples of a task in their stored order, for extra communication rounds.

        Where clients are not told where tasks end (``exposure: asynchronous``, ``streaming``) those of its portion, in
        the order of their handles, because the order of a portion would reveal its tasks.

        Yields:
            ``[b, C, H, W]`` network input and ``[b]`` output indices, ``b <= batch_size``.
        """
        if self.exposure in OWN_PACE:
            portion = torch.from_numpy(self.global_index_trained_on(task, client))
            for part in portion[self.handles.of(portion).argsort()].to(device).split(batch_size):
                yield self._gather_global(part)
            return
        task = unwrap_task(task)
        own = torch.from_numpy(self.indices[task][client]).to(device)
        for part in own.split(batch_size):
            yield self.gather(task, part)

    def validation_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's validation samples of a task, which are never trained on and never augmented.

        Yields:
            As :meth:`client_batches`.
        """
        stream_task = self.stream_task(unwrap_task(task), client)
        own = torch.from_numpy(self.validation_indices(task, client)).to(device)
        for part in own.split(batch_size):
            # If all clients share the current task, its transformed images are cached.
            kept = self.order is None
            yield self.inputs.of_task(stream_task, part) if kept else self.inputs.stored(stream_task, part)


def _measures_of(stream: Stream) -> list[Measure]:
    """The measures that compare outputs with labels like a stream's."""
    return [measure for measure in MEASURES if measure.targets == stream.targets]


def _scenario_by_labels(stream: Stream) -> Scenario:
    """The scenario of a stream where the user names none."""
    if stream.targets == "classes":
        return "domain" if stream.shared_labels else "task"
    return cast(Scenario, _measures_of(stream)[0].scenarios[0])


class _Later(Sequence[np.ndarray]):
    """Clients of every task, computed on first access."""

    def __init__(self, count: int, find: Callable[[], list[np.ndarray]]) -> None:
        self._count, self._find = count, find

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, task: Any) -> Any:
        return self._find()[task]
