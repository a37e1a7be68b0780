"""The Lightning data module: reads and checks the data of a run, and loads its rounds and test sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from cfl.data.augmentation import Augmentation
from cfl.data.client_inputs import ClientInputs
from cfl.data.cohort_dealing import deal_clients, local_steps
from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.data_warnings import data_warnings
from cfl.data.digest import check_digests, data_digests
from cfl.data.evaluation import EvaluationBatch, EvaluationLoader, NothingToEvaluate
from cfl.data.exposure import OWN_PACE, STREAMING, Exposure
from cfl.data.participation import AllClients, Participation
from cfl.data.partitions import IID, Partition
from cfl.data.round_loader import RoundLoader
from cfl.data.scenarios import Scenario, check_answers_compete, check_class_loss, require_binary, scenario_of
from cfl.data.schedule import BoundSchedule, RoundPlan, Schedule
from cfl.data.sequences import TaskSequences
from cfl.data.sources.base import Source
from cfl.data.sources.root import data_root
from cfl.data.streams import Stream
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory
from cfl.runtime.option_checks import check_choices, check_integers

_BYTES_PER_EPOCH = 200
"""Bytes that the random numbers of one local epoch of a client take at least."""


class CountsRounds(Protocol):
    """An object that counts rounds: the federation."""

    round: int


class FederatedDataModule(ClientInputs, LightningDataModule):
    """Deals a task stream to clients and serves their samples round by round.

    Args:
        stream: the tasks in their order, and the data set(s) they are cut from.
        schedule: rounds, sampling and local work (in YAML the top-level key ``schedule``).
        partition: how one task's samples are dealt to the clients that hold it; IID if not given.
        participation: which clients hold which task; all clients hold all tasks if not given.
        num_clients: number of clients C.
        repartition: deal every task anew. If false, all tasks are dealt together: tasks over the same samples have the
            same partition. If tasks have different samples, a client may have many of one task and few of another.
        scenario: ``task``, ``class`` or ``domain`` incremental; ``density``: labels are not used, samples are binary
            and the network estimates their density; ``regression``: labels are numbers, which the network predicts; or
            ``detection``: labels are boxes, which it finds. null takes ``regression`` or ``detection`` if labels are
            numbers or boxes, else ``domain`` if a label means the same in every task (permuted, rotated), else
            ``task``.
        class_loss: classes in the training loss of a class-incremental run: ``all`` classes of the stream, those
            ``seen`` so far, also for replayed samples of earlier tasks, or those of a sample's ``own`` task, as in
            task-incremental runs. With ``seen``, tests choose among these classes, since nothing has been learned about
            the others. With ``exposure: joint`` all classes are seen from the first round on. Exposures that tell
            methods no task boundaries, and all other scenarios, allow ``all`` only.
        root: folder with the data sets' files; null takes the environment variable CFL_DATA_ROOT, else ``data``.
        eval_batch_size: test samples per evaluation step. Affects results only of networks that normalise with the test
            batch's own statistics.
        eval_shuffle: evaluate each test set in a random order, the same in every round of a run, instead of its stored
            one. Affects the same networks as ``eval_batch_size``, because a stored order is often one class after
            another.
        exposure: samples that clients train on during a task. ``sequential``: those of the task. ``unannounced``: the
            same, but methods are told neither tasks nor where they end. ``cumulative``: those of all tasks so far.
            ``joint``: those of all tasks of the stream from the first round on. The latter two are upper bounds of
            continual learning. ``asynchronous``: each client goes through its samples in the order of
            the tasks at its own pace (:func:`cfl.data.exposure.portions`), so that there are no common task boundaries;
            the schedule's tasks are then periods. ``streaming``: each client goes through its samples in the order of
            the tasks and of the data set, and every round has the next seconds of them
            (:func:`cfl.data.exposure.samples_by_round`). A client that is not sampled misses the samples of that round.
            The schedule's tasks then only say after which rounds a row of the accuracy matrix is complete.
            ``streaming-cumulative``: the same, but a client trains on its samples of all rounds so far, missed ones
            included; an upper bound.
        portion: asynchronous: samples per client and period. streaming: seconds per client and round; a sample lasts as
            long as the data set says, else a second. null cuts each client's samples, or its time, into equal parts.
        sequences: the stream's tasks that each client learns, and their order; null: all tasks, in the stream's order.
            With sequences, "task t" is every client's own t-th task. Only images, and outputs unless they go by place,
            follow the stream's numbers (:class:`cfl.data.sequences.TaskSequences`).
        validation: share of each client's training samples of every task that is set aside, in [0, 1)
            (:func:`cfl.data.validation.set_aside`). They are used neither in training nor in memories and extra
            communication rounds; methods can validate with them (:meth:`validation_batches`).
        evaluate_on: samples that accuracies (or likelihoods) are computed on: the ``test`` sets or, for choosing
            settings, ``validation``: samples of a task that clients have set aside, and that no client trains on in
            this task.
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
        ClientInputs.__init__(
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
        self.scenario = scenario_of(stream, scenario)
        if augmentation is not None and stream.targets == "boxes" and not augmentation.moves_boxes:
            valid = "null or one that moves boxes with their images, such as CropFlip"
            raise ConfigError("data.augmentation", type(augmentation).__name__, valid)
        if augmentation is not None and stream.shape[:2] == (1, 1):
            valid = "null: samples are rows of numbers, not images"
            raise ConfigError("data.augmentation", type(augmentation).__name__, valid)
        self.measure.require()
        check_class_loss(class_loss, self.scenario, exposure, in_own_order=sequences is not None)
        if sequences is not None and sequences.outputs == "place" and self.scenario != "task":
            raise ConfigError("data.scenario", self.scenario, "task with data.sequences.outputs: place")
        self.class_loss = class_loss
        check_answers_compete(stream, self.scenario, self.num_outputs)
        self.eval_batch_size = eval_batch_size
        self.eval_shuffle = eval_shuffle
        self.evaluate_on = evaluate_on
        self.augmentation = augmentation
        self._counter: CountsRounds | None = None
        self.all_batches_everywhere = False
        self.steps_per_block = 1
        # A process may have no batch of one task's test set, but batches of another's.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._unread: Exception | None = None
        self._warned = False

    # The current round.

    def forget_run(self) -> None:
        """Undo what an earlier run on these data has set: outputs in the loss, and the round after which it ended."""
        vars(self).pop("outputs", None)  # computed again
        self.rounds.ends_after = None

    def follow(self, counter: CountsRounds) -> None:
        """Set the object from which the current round is read."""
        self._counter = counter

    @property
    def next_round(self) -> int:
        """The running or the next round; 0 before :meth:`follow`."""
        return 0 if self._counter is None else self._counter.round

    # Known without reading a file, so that a network can be sized and a schedule checked before loading.

    @cached_property
    def rounds(self) -> BoundSchedule:
        """The schedule for this stream and these clients. Files are read only when clients are needed."""
        return self.schedule.bind(self.eligible, self.seed, lambda: self.members)

    @property
    def num_rounds(self) -> int:
        """Communication rounds over all tasks: Lightning's ``max_epochs``."""
        return self.rounds.num_rounds

    # Reading files.

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of the stream's ``train`` and ``test`` samples (:mod:`cfl.data.digest`)."""
        return data_digests(self.tasks, self.partition.by_owner, self.exposure in STREAMING)

    def state_dict(self) -> dict[str, Any]:
        """The data module's state for checkpoints: digests of the samples, and the facts that were read from files."""
        return {"digests": self.digests, "files": self.of_files}

    @cached_property
    def of_files(self) -> dict[str, dict[str, Any]]:
        """:meth:`cfl.data.sources.base.Source.facts_for_checkpoint` of the stream's data sets."""
        found: dict[str, dict[str, Any]] = {}
        for task in range(self.stream.num_tasks):
            source: Any = self.stream.source_of(task)
            while isinstance(source, Source):
                found |= source.facts_for_checkpoint(self.root)
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
            except Exception as error:  # the other processes are waiting, so :meth:`setup` raises it
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
        self._given.check_numbers(self.root, shared_outputs=self.scenario in ("domain", "regression"))
        if self.exposure in OWN_PACE:
            _ = self._portions
        epochs = self.schedule.local_epochs
        needed = _BYTES_PER_EPOCH * epochs * self.rounds.most_clients
        require_memory("schedule.local_epochs", epochs, needed, "fewer")
        if not self._warned and not distributed.rank():
            self._warned = True
            for sentence in data_warnings(self):
                warnings.warn(sentence, stacklevel=2)

    # Lightning's loaders.

    def own_clients(self, task: int, clients: Sequence[int]) -> list[int]:
        """Those of ``clients`` that this process computes, ascending; all of them if there is only one process.

        A client of a round belongs to the process that trains it, unless clients have clocks of their own
        (:meth:`trained_here`). A client that does not hold the task counts as if it had one local step.

        Args:
            task: the task whose data they use.
            clients: the same in all processes.
        """
        if distributed.count() == 1:
            return sorted(clients)
        return self._own_of(self.trained_on(task), clients)

    def trained_here(self, plan: RoundPlan) -> list[int]:
        """The clients of a round that this process trains, ascending."""
        return sorted(plan.clients) if distributed.count() == 1 else self._own_of(self.trained_in(plan), plan.clients)

    def _own_of(self, held: Mapping[int, np.ndarray], clients: Sequence[int]) -> list[int]:
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

    def on_after_batch_transfer(
        self, batch: CohortBatch | CohortBlock | EvaluationBatch, dataloader_idx: int
    ) -> CohortBatch | CohortBlock | EvaluationBatch:
        """Add the functions that fetch samples on the device (training), or the samples themselves (evaluation)."""
        # ``next_round`` is the running round, because the federation counts a round when it ends.
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
