"""The context of a method: everything that it may use of its run.

Read this file after :mod:`cfl.methods.base` to write a method. Every method is set up with its own context; a
``task_free`` method is shown a part of it (:mod:`cfl.methods.task_free`). The context gives no public access to the
federation, its data module, its schedule or its server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl.data.scenarios import OutputMap
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import TaskHandles, TaskRef
from cfl.data.types import PixelTransform
from cfl.federation.federation import Federation
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.runtime import distributed

if TYPE_CHECKING:
    from cfl.methods.base import Method

T = TypeVar("T")


class Context:
    """The model, the clients' samples and states, the channel, and the rounds of a run, as methods use them.

    Tensors are those of the run, not copies, unless a function says otherwise. Clients and tasks are numbered from 0;
    task-free methods have handles in place of task numbers.

    Args:
        federation: the run's.

    Attributes:
        network: the global model.
        shared_parameters: names of the parameters that clients and server exchange.
        shared_buffers: names of the buffers that clients and server exchange.
        personal: names of parameters and buffers that stay on their client from round to round.
        frozen: names of parameters that are neither trained nor sent.
        has_personal_models: whether clients have parameters of their own.
        batchnorm: the setting for BatchNorm's running statistics: ``average``, ``local`` or ``drop``.
        channel: carries messages between clients and server and counts their bytes.
        clients: states that clients keep between rounds, by topic.
        buffer: the clients' replay buffers, or None if no method uses them.
        methods: name -> method, all methods of the run in their order, to look up their classes, their capabilities and
            their declarations (:mod:`cfl.methods.capabilities`).
        seed: the run's seed, for :mod:`cfl.randomness.generators`.
        scenario: ``task``, ``class``, ``domain``, ``density``, ``regression`` or ``detection``.
        measure: what clients are trained and evaluated by (:class:`cfl.metrics.base.Measure`).
        exposure: the tasks whose samples clients train on during a task (``data.exposure``).
        class_loss: ``all``, ``seen`` or ``own``, the setting ``data.class_loss``.
        input_shape: ``(C, H, W)``.
        num_outputs: number O of the network's outputs.
        num_clients: number C of clients.
        num_tasks: number T of tasks that a client learns.
        num_rounds: number of rounds of all tasks together.
        client_clocks: whether clients change tasks in different rounds.
        client_weighting: weights of the clients' updates: ``uniform`` (each 1) or ``samples`` (``cohort.sizes``).
        local_epochs: the setting ``schedule.local_epochs``.
        batch_size: batch size of local steps.
        eval_batch_size: batch size of passes without gradients.
        augments: whether local training augments images.
        validation: share of each client's samples that is set aside.
        root: folder with the data sets' files.
        optimizer: an optimizer like those of the clients, to read its options from; None if nothing is trained.
    """

    def __init__(self, federation: Federation) -> None:
        data, rounds = federation.data, federation.schedule
        self._federation, self._data, self._rounds = federation, data, rounds
        self.network = federation.network
        model = federation.model
        self.shared_parameters, self.shared_buffers = model.shared_parameters, model.shared_buffers
        self.personal, self.frozen = model.personal, model.frozen
        self.has_personal_models, self.batchnorm = model.has_personal_models, model.batchnorm
        self.channel, self.clients, self.buffer = federation.channel, federation.clients, federation.buffer
        self.methods: Mapping[str, Method] = dict(federation.methods)
        self.seed, self.root = data.seed, data.root
        self.measure, self.client_weighting = federation.measure, federation.client_weighting
        self.scenario, self.exposure, self.class_loss = data.scenario, data.exposure, data.class_loss
        self.input_shape, self.num_outputs = data.input_shape, data.num_outputs
        self.num_clients, self.num_tasks = data.num_clients, data.num_tasks
        self.num_rounds, self.client_clocks = rounds.num_rounds, rounds.client_clocks
        self.local_epochs, self.batch_size = data.schedule.local_epochs, data.schedule.batch_size
        self.eval_batch_size, self.optimizer = data.eval_batch_size, federation.optimizer
        self.augments, self.validation = data.augmentation is not None, data.validation

    # The model.

    @property
    def device(self) -> torch.device:
        """The device of the global model."""
        return next(self.network.parameters()).device

    def state_tensors(self) -> dict[str, Tensor]:
        """The global model's parameters and buffers by name."""
        return self._federation.model.state_tensors()

    def shared_tensors(self) -> dict[str, Tensor]:
        """The message that carries the global model to a client: name -> tensor."""
        return self._federation.model.shared_tensors()

    def personal_state(self, clients: tuple[int, ...]) -> dict[str, Tensor]:
        """Copies of the parameters and buffers that these k clients never send, name -> ``[k, ...]``; at first the
        initial values."""
        return self._federation.model.personal_state(clients)

    def evaluation_statistics(self) -> AbstractContextManager[None]:
        """A ``with`` block in which BatchNorm uses the batch's statistics if the evaluated model has none."""
        return self._federation.model.evaluation_statistics()

    def once_per_test(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The result of ``compute()`` for a test batch, for use in ``classify``.

        While there is room, results are kept under ``name`` and returned again for the same batch in later evaluations.
        ``compute`` may therefore depend only on the batch and on values that no longer change.
        """
        return self._federation.repeated_tests.once(name, compute)

    def forget_momentum(self) -> None:
        """Reset the server's momentum."""
        self._federation.server.velocity.clear()

    # Where the run is.

    @property
    def round(self) -> int:
        """The running round, or the next one between rounds, from 0."""
        return self._federation.round

    @property
    def finished(self) -> bool:
        """Whether the run has no further round."""
        return self._federation.finished

    @property
    def accuracy(self) -> AccuracyMatrix:
        """The accuracy matrix so far."""
        return self._federation.accuracy

    @property
    def most_clients(self) -> int:
        """The largest number of clients in a round."""
        return self._rounds.most_clients

    def plan(self, round: int) -> RoundPlan:
        """The plan of a round: its task and its clients."""
        return self._rounds.round(round)

    def present(self, round: int) -> np.ndarray:
        """The clients that may be sampled in a round, ascending."""
        return self._rounds.present(round)

    def expected_clients(self, round: int) -> float:
        """The number of clients in a round, or its expectation with ``schedule.sampling: poisson``."""
        return self._rounds.expected_clients(round)

    def task_of(self, round: int) -> int:
        """The task of a round; if clients have their own clocks, the earliest task that a client may be at."""
        return self._rounds.task_of(round)

    def task_at(self, round: int, client: int) -> int:
        """The task that a client is at in a round."""
        return self._rounds.task_at(round, client)

    def began(self, task: int, client: int) -> int:
        """The round in which a client begins a task."""
        return self._rounds.began(task, client)

    def due(self, plan: RoundPlan) -> list[int]:
        """The clients whose task ends with a round, sampled or not."""
        return self._rounds.due(plan)

    def is_last(self, task: int) -> bool:
        """Whether the task is the last one."""
        return task + 1 >= self.num_tasks

    # The clients' samples. :attr:`num_outputs` is O.

    @property
    def outputs(self) -> OutputMap:
        """Maps the tasks' classes to the network's outputs: ``outputs.own`` is ``[T, O]`` bool, those of each task."""
        return self._data.outputs

    def train_own_outputs(self) -> None:
        """Restrict the training losses of all tasks to the outputs of their own classes, for all methods."""
        # Set in the data instead of in a loss, so that all code sees the same trained outputs.
        self._data.outputs = replace(self._data.outputs, train=self._data.outputs.own, grows=False)

    def outputs_in_loss(self, task: TaskRef, client: int) -> Tensor | None:
        """``[O]`` bool, the outputs in a client's loss in a task, or None for all."""
        return self._data.outputs_in_loss(task, client)

    def outputs_in_loss_of(self, samples: Tensor | TaskHandles, task: TaskRef) -> Tensor | None:
        """``[..., O]`` bool, the outputs in the loss of samples that are replayed during ``task``, or None for all.
        ``samples`` ``[...]`` are the tasks of these samples."""
        return self._data.outputs_in_loss_of(samples, task)

    def client_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training samples of a task, in a fixed order: ``[b, C, H, W]`` inputs and ``[b]`` outputs,
        ``b <= batch_size``."""
        return self._data.client_batches(task, client, batch_size, device)

    def indices(self, task: int, client: int) -> np.ndarray:
        """``[n]`` indices of a client's training samples of a task, for :meth:`gather`; empty if it has none."""
        return self._data.indices[task].get(client, np.zeros(0, dtype=np.int64))

    def gather(self, task: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., C, H, W]`` inputs and ``[...]`` outputs of :meth:`indices` ``[...]``."""
        return self._data.gather(task, index)

    def samples_of(
        self, tasks: Tensor, index: Tensor, moment: tuple[int, int] | None, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`gather`, for :meth:`indices` of several tasks.

        Args:
            tasks: ``[...]`` int64.
            index: ``[...]`` int64 into the training set of each sample's task.
            moment: (round, step) of training on them, which keys the augmentation; None for no augmentation.
            device: device of the result; None for that of ``index``. With indices on the CPU, the program does not wait
                for an accelerator.
        """
        return self._data.inputs.of_tasks(tasks, index, moment, device=device)

    def global_index_of(self, task: int, client: int) -> np.ndarray:
        """``[n]`` ascending global indices of a client's samples of a task."""
        return self._data.client_global_index(task, client)

    def global_index_trained_on(self, task: TaskRef, client: int) -> np.ndarray:
        """``[n]`` ascending global indices of all samples that a client trains on during a task."""
        return self._data.global_index_trained_on(task, client)

    @property
    def most_trained_on(self) -> int:
        """The most samples that a client trains on in one round."""
        return self._data.most_trained_on

    def samples_at(
        self, places: Tensor, moment: tuple[int, int] | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor, TaskHandles]:
        """``[..., C, H, W]`` inputs, ``[...]`` outputs and tasks of the samples with the global indices ``places``
        ``[...]``; ``moment`` and ``device`` as for :meth:`samples_of`."""
        return self._data.samples_at(places, moment, None, device)

    def labels_at(self, places: Tensor) -> Tensor:
        """``[n]`` outputs of the samples with the global indices ``places`` ``[n]``, without loading images."""
        return self._data.labels_at(places)

    def transform_of(self, task: int) -> PixelTransform:
        """The transform from stored pixels to a task's network inputs."""
        return self._data.tasks[task].transform

    def num_validating(self, task: int, client: int) -> int:
        """Number of a client's samples of a task that are set aside for validation."""
        return len(self._data.validation_indices(task, client))

    def validation_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`client_batches`, for the samples set aside."""
        return self._data.validation_batches(task, client, batch_size, device)

    # Extra rounds and several processes.

    def members(self, task: TaskRef) -> list[int]:
        """The clients that hold a task, ascending."""
        return self._federation.members(task)

    def own_clients(self, task: TaskRef, clients: Sequence[int]) -> list[int]:
        """Those of ``clients`` that this process computes; ``task`` is the task whose samples they use."""
        return self._federation.own_clients(task, clients)

    def extra_round(self, task: int, clients: Sequence[int]) -> list[int]:
        """Send clients the new global model for an extra round; returns those of this process, ascending."""
        own = self.own_clients(task, clients)
        self.channel.downlink("model", self.shared_tensors(), len(own))
        return own

    def everyones(self, value: T) -> list[T]:
        """Collect a small plain value from every process, by rank; all processes must call this."""
        return distributed.gather(value)

    def at_server(self, compute: Callable[[], T]) -> T:
        """Run a computation of the server in the first process and return its result in all; all must call this.

        It is computed once because rounding may differ between processes.

        Args:
            compute: returns tensors, plain values, and dictionaries, lists and tuples of these. With several processes
                the returned tensors are on the CPU.
        """
        return distributed.computed_once(compute)
