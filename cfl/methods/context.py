"""What a method is given of the run it is part of: a narrow door, with nothing of the machinery behind it.

A method author reads this file after :mod:`cfl.methods.base`. Every method is set up with a context of its own, which a
``task_free`` method is shown less of (:mod:`cfl.methods.task_free`). Nothing public of it leads to the federation, its
data module, its schedule or its server. What is not here, a method does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

if TYPE_CHECKING:
    from cfl.methods.base import Method

T = TypeVar("T")


class Context:
    """The model, what clients hold and keep, what passes between them and the server, and where the run is.

    Tensors are those of the run, not copies, unless it says so. A client is named by its number, a task by its number
    from 0, or by what stands for it.

    Args:
        federation: the run's.

    Attributes:
        network: the global model.
        shared_parameters: names of the parameters that clients and server exchange.
        shared_buffers: names of the buffers that clients and server exchange.
        personal: names of parameters and buffers that stay on their client from round to round.
        frozen: names of parameters that nobody trains or sends.
        has_personal_models: whether clients' models differ in a parameter.
        batchnorm: what becomes of BatchNorm's running statistics: ``average``, ``local`` or ``drop``.
        channel: messages between clients and server, which counts them.
        clients: what clients keep between rounds, by topic.
        buffer: samples that clients keep for replay, or None where no method asks for them.
        methods: name -> method, of all methods of the run in their order, to see what they declare.
        seed: the run's, for :mod:`cfl.randomness.generators`.
        scenario: ``task``, ``class``, ``domain`` or ``density``.
        exposure: which tasks' samples clients train on during a task.
        class_loss: ``all`` or ``seen``, the setting ``data.class_loss``.
        input_shape: ``(C, H, W)``.
        num_outputs: O, the network's.
        num_clients: C.
        num_tasks: T, how many a client learns.
        num_rounds: of all tasks together.
        client_clocks: whether clients change tasks each in its own round.
        clock_spread: the setting ``schedule.clock_spread``.
        local_epochs: the setting ``schedule.local_epochs``.
        batch_size: of local steps.
        eval_batch_size: for passes without gradients.
        augments: whether local training augments images.
        validation: share of each client's samples that is set aside.
        root: folder with the data sets' files.
        optimizer: one like those that clients will have, for its options; None where nobody trains.
    """

    def __init__(self, federation: Federation) -> None:
        data, rounds = federation.data, federation.schedule
        self._federation, self._data, self._rounds = federation, data, rounds
        self.network = federation.network
        self.shared_parameters, self.shared_buffers = federation.shared_parameters, federation.shared_buffers
        self.personal, self.frozen = federation.personal, federation.frozen
        self.has_personal_models, self.batchnorm = federation.has_personal_models, federation.batchnorm
        self.channel, self.clients, self.buffer = federation.channel, federation.clients, federation.buffer
        self.methods: dict[str, Method] = dict(federation.methods)
        self.seed, self.root = data.seed, data.root
        self.scenario, self.exposure, self.class_loss = data.scenario, data.exposure, data.class_loss
        self.input_shape, self.num_outputs = data.input_shape, data.num_outputs
        self.num_clients, self.num_tasks = data.num_clients, data.num_tasks
        self.num_rounds, self.client_clocks = rounds.num_rounds, rounds.client_clocks
        self.clock_spread, self.local_epochs = data.schedule.clock_spread, data.schedule.local_epochs
        self.batch_size, self.eval_batch_size = data.schedule.batch_size, data.eval_batch_size
        self.optimizer = federation.optimizer
        self.augments, self.validation = data.augmentation is not None, data.validation

    # The model.

    def state_tensors(self) -> dict[str, Tensor]:
        """The global model's parameters and buffers by name."""
        return self._federation.state_tensors()

    def shared_tensors(self) -> dict[str, Tensor]:
        """The message that carries the global model to a client: name -> tensor."""
        return self._federation.shared_tensors()

    def personal_state(self, clients: tuple[int, ...]) -> dict[str, Tensor]:
        """What these k clients keep of the model to themselves: name -> ``[k, ...]``, copied; of untrained clients the
        initial values."""
        return self._federation.personal_state(clients)

    def evaluation_statistics(self) -> AbstractContextManager[None]:
        """Within it, BatchNorm uses the batch's statistics where the evaluated model holds none of its own."""
        return self._federation.evaluation_statistics()

    def forget_momentum(self) -> None:
        """Let the server's next step be its first."""
        self._federation.server.velocity.clear()

    # Where the run is.

    @property
    def round(self) -> int:
        """The running round, or the next one when it has ended, from 0."""
        return self._federation.round

    @property
    def finished(self) -> bool:
        """Whether no round follows."""
        return self._federation.finished

    @property
    def accuracy(self) -> AccuracyMatrix:
        """What has been measured so far."""
        return self._federation.accuracy

    @property
    def most_clients(self) -> int:
        """Most clients of a round."""
        return self._rounds.most_clients

    def plan(self, round: int) -> RoundPlan:
        """Who takes part in a round, at which task."""
        return self._rounds.round(round)

    def present(self, round: int) -> np.ndarray:
        """The clients that may be sampled in a round, ascending."""
        return self._rounds.present(round)

    def task_of(self, round: int) -> int:
        """A round's task; with clocks of their own the first that a client may be at."""
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
        """Whether no task follows."""
        return task + 1 >= self.num_tasks

    # What clients hold of samples. :attr:`num_outputs` is O.

    @property
    def outputs(self) -> OutputMap:
        """How the tasks' classes lie over the network's outputs."""
        return self._data.outputs

    def train_own_outputs(self) -> None:
        """Take training losses of every task over the outputs of its own classes alone, for all methods."""
        # There, and not in a loss, so that whatever asks which outputs are trained gets the same answer.
        self._data.outputs = replace(self._data.outputs, train=self._data.outputs.own, grows=False)

    def outputs_in_loss(self, task: TaskRef, client: int) -> Tensor | None:
        """``[O]`` bool, the outputs that a client's loss is taken over in a task, or None for all."""
        return self._data.outputs_in_loss(task, client)

    def outputs_in_loss_of(self, samples: Tensor | TaskHandles, task: TaskRef) -> Tensor | None:
        """``[..., O]`` bool, the same for samples of the tasks ``samples`` ``[...]`` that are replayed during ``task``,
        or None for all."""
        return self._data.outputs_in_loss_of(samples, task)

    def client_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's training samples of a task, in a fixed order: ``[b, C, H, W]`` inputs and ``[b]`` outputs,
        ``b <= batch_size``."""
        return self._data.client_batches(task, client, batch_size, device)

    def indices(self, task: int, client: int) -> np.ndarray:
        """``[n]``, a client's training samples of a task, as :meth:`gather` finds them."""
        return self._data.indices[task][client]

    def gather(self, task: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., C, H, W]`` inputs and ``[...]`` outputs of :meth:`indices` ``[...]``."""
        return self._data.gather(task, index)

    def samples_of(self, tasks: Tensor, index: Tensor, moment: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """As :meth:`gather`, of several tasks' :meth:`indices`.

        Args:
            tasks: ``[...]`` int64.
            index: ``[...]`` int64 into each one's task.
            moment: (round, step) in which they are trained on, for the augmentation; None leaves them alone.
        """
        return self._data.inputs.of_tasks(tasks, index, moment)

    def global_index_of(self, task: int, client: int) -> np.ndarray:
        """``[n]`` ascending places, which number all tasks' samples, of a client's samples of a task."""
        return self._data.client_global_index(task, client)

    def global_index_trained_on(self, task: TaskRef, client: int) -> np.ndarray:
        """``[n]`` ascending places of what a client trains on during a task, also of other tasks'."""
        return self._data.global_index_trained_on(task, client)

    @property
    def most_trained_on(self) -> int:
        """The most samples that a client trains on in one round."""
        return self._data.most_trained_on

    def samples_at(self, places: Tensor, moment: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, TaskHandles]:
        """``[..., C, H, W]`` inputs, ``[...]`` outputs and tasks of the samples at ``places`` ``[...]``; ``moment`` as
        for :meth:`samples_of`."""
        return self._data.samples_at(places, moment)

    def labels_at(self, places: Tensor) -> Tensor:
        """``[n]`` outputs of the samples at ``places`` ``[n]``, without their images."""
        return self._data.labels_at(places)

    def transform_of(self, task: int) -> PixelTransform:
        """What makes a task's inputs of stored pixels."""
        return self._data.tasks[task].transform

    def num_validating(self, task: int, client: int) -> int:
        """How many of its samples of a task a client has set aside."""
        return len(self._data.validation_indices(task, client))

    def validation_batches(
        self, task: TaskRef, client: int, batch_size: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`client_batches`, of the samples set aside."""
        return self._data.validation_batches(task, client, batch_size, device)

    # Who has a part in an extra round, and several processes.

    def members(self, task: TaskRef) -> list[int]:
        """The clients that hold a task, ascending."""
        return self._federation.members(task)

    def select_clients(self, plan: RoundPlan, whom: str) -> list[int]:
        """Clients of an extra round: those ``sampled`` in the round that has ended, or ``all`` that hold its task."""
        return list(plan.clients) if whom == "sampled" else self.members(plan.task)

    def own_clients(self, task: TaskRef, clients: Sequence[int]) -> list[int]:
        """Those of these clients, the same in all processes, that fall to this process; they use a task's samples."""
        return self._federation.own_clients(task, clients)

    def extra_round(self, task: int, clients: Sequence[int]) -> list[int]:
        """Send clients the new global model for an extra round; :meth:`own_clients` of them, ascending."""
        own = self.own_clients(task, clients)
        self.channel.downlink("model", self.shared_tensors(), len(own))
        return own

    def everyones(self, value: T) -> list[T]:
        """What each process has, small and of plain values; all processes must call this."""
        return self._federation.everyones(value)

    def at_server(self, compute: Callable[[], T]) -> T:
        """What the server computes: once, in the first process; all processes must call this.

        Args:
            compute: gives tensors, plain values, and dictionaries, lists and tuples of these; where there are several
                processes, its tensors come on the CPU.
        """
        return self._federation.at_server(compute)
