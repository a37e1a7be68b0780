"""Samples of clients and test sets as network inputs and targets, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cfl.data.augmentation import Augmentation
from cfl.data.client_data import ClientDataAssignment
from cfl.data.cohorts import CohortBatch
from cfl.data.evaluation import EvaluationBatch
from cfl.data.exposure import OWN_PACE
from cfl.data.inputs import Inputs, Moment
from cfl.data.scenarios import OutputMap, Scenario, output_map
from cfl.data.task_handles import TaskHandles, TaskRef, unwrap_task, unwrap_tasks
from cfl.data.types import Task
from cfl.metrics.measure import Measure, measure_of
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved


class ClientInputs(ClientDataAssignment):
    """The samples that :class:`~cfl.data.client_data.ClientDataAssignment` deals, as network inputs and targets.

    Attributes:
        scenario, class_loss, eval_shuffle, evaluate_on, augmentation: the settings of these names, which
            :class:`cfl.data.datamodule.FederatedDataModule` explains and sets.
    """

    scenario: Scenario
    class_loss: str
    eval_shuffle: bool
    evaluate_on: Literal["test", "validation"]
    augmentation: Augmentation | None

    # Known without reading a file, so that a network can be sized before loading.

    @cached_property
    def measure(self) -> Measure:
        """The measure by which the model is trained and evaluated."""
        return measure_of(self.scenario).on(self.stream.shape)

    @cached_property
    def outputs(self) -> OutputMap:
        """Maps the tasks' classes to the network's outputs."""
        variables = self.measure.num_outputs(self.stream.shape, self.stream.classes_per_task)
        class_loss = "all" if self.exposure == "joint" and self.class_loss == "seen" else self.class_loss
        groups = None
        if self.sequences is not None and self.sequences.outputs == "place":
            groups = [task % self.num_tasks for task in range(self.stream.num_tasks)]
        classes = self.stream.classes_per_task
        return output_map(classes, self.scenario, class_loss, variables, groups)  # type: ignore[arg-type]

    @property
    def num_outputs(self) -> int:
        """Size of the network's output layer."""
        return self.outputs.num_outputs

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of the network's input."""
        return self.stream.shape

    # Read from files.

    @cached_property
    def evaluated(self) -> list[Task]:
        """The stream's tasks, whose test sets are the samples that figures are computed on.

        Validation samples are those of clients, so that a task that no client learns has none.

        Raises:
            ConfigError: ``data.stream``: a task has no test sample; ``data.validation``: a task that a client learns
                has no validation sample that is not trained on.
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
            if not len(held_out) and self.learners(number):
                valid = f"a larger share: task {number} has no validation sample that is not trained on"
                raise ConfigError("data.validation", self.validation, valid)
            found.append(replace(task, test=task.train.subset(torch.from_numpy(held_out))))
        return found

    @cached_property
    def tests_by_owner(self) -> bool:
        """Whether the data say which of the run's clients own the samples that figures are computed on."""
        return self.partition.by_owner and any(task.test.clients is not None for task in self.evaluated)

    @cached_property
    def same_tests(self) -> list[int]:
        """For each of the stream's tasks, the first one whose test inputs are the same, in the same order."""
        if self.eval_shuffle:  # every task has an order of its own
            return list(range(len(self.evaluated)))
        first: dict[int, int] = {}
        return [first.setdefault(id(task), number) for number, task in enumerate(self.evaluated)]

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
        global_index: Tensor,
        moment: Moment | None = None,
        words: Tensor | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor, TaskHandles]:
        """Training samples with :attr:`global_index` ``[...]``: network input and output indices as returned by
        :meth:`cfl.data.inputs.Inputs.of_tasks`, and their tasks."""
        tasks, index = self.global_index.split(global_index)
        x, y = self.inputs.of_tasks(tasks, index, moment, words, device)
        return x, y, TaskHandles(moved(tasks, y.device))

    def labels_at(self, global_index: Tensor) -> Tensor:
        """``[n]`` int64 output index of training samples with :attr:`global_index` ``[n]``, without their images."""
        return self.inputs.labels(*self.global_index.split(global_index))

    def _gather_global(
        self, global_index: Tensor, moment: Moment | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`gather`, for :attr:`global_index`; on ``device`` if it is given."""
        return self.samples_at(global_index, moment, device=device)[:2]

    def outputs_in_loss(self, task: TaskRef, client: int) -> Tensor | None:
        """``[O]`` bool, the outputs in the training loss of a client's task, or None for all."""
        train = self.outputs.train
        return None if train is None else train[self.stream_task(unwrap_task(task), client)]

    def outputs_in_loss_of(self, samples: Tensor | TaskHandles, task: TaskRef) -> Tensor | None:
        """``[..., O]`` bool, the outputs in the loss of samples of tasks ``[...]`` while ``task`` is trained on, or
        None for all."""
        train, tasks = self.outputs.in_loss_during(unwrap_task(task)), unwrap_tasks(samples)
        return None if train is None else train.to(tasks.device)[tasks]

    def with_samples(self, batch: CohortBatch, moment: tuple[int, int] | None) -> CohortBatch:
        """``batch`` with the functions that fetch its samples, see :meth:`gather`, and their handles."""
        handles = partial(self.handles_in_steps, batch.task)  # computed when needed
        if self.by_global_index:
            # Samples are fetched task by task. Indices on an accelerator would have to be read to know their tasks.
            gather, tasks = partial(self._gather_global, moment=moment), self.global_index.tasks
            return replace(batch, gather=gather, gather_from_cpu=gather, tasks_of_own=tasks, handles=handles)
        return replace(batch, gather=partial(self.gather, batch.task, moment=moment), handles=handles)

    def evaluation_batch(self, batch: EvaluationBatch, device: torch.device) -> EvaluationBatch:
        """``batch`` with ``x``, ``y`` and ``owners`` on ``device``."""
        samples = batch.task, slice(batch.start, batch.stop), device, self.eval_shuffle
        x, y = self.inputs.of_test_set(*samples)
        owners = self.inputs.owners_of_test_set(*samples) if self.tests_by_owner else None
        return replace(batch, x=x, y=y, owners=owners)

    def client_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training samples of a task in their stored order, for extra communication rounds.

        Without common task boundaries (``exposure: asynchronous``, ``streaming``) they are the samples of its portion,
        in the order of their handles, because their stored order would reveal the tasks.

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
            yield self.inputs.of_task(stream_task, part) if kept else self.inputs.uncached(stream_task, part)
