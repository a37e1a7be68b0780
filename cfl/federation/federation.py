"""The state of an experiment between two rounds, which is what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from cfl.data.datamodule import FederatedDataModule
from cfl.data.samples_of_other_tasks import bytes_of_other_tasks, samples_of_other_tasks
from cfl.data.schedule import BoundSchedule, RoundPlan
from cfl.data.task_handles import TaskRef, unwrap_task
from cfl.federation.channel import UPDATE, Channel, payload_bytes
from cfl.federation.federated_model import MODEL_TOPIC, FederatedModel
from cfl.federation.method_protocol import MethodComposition
from cfl.federation.repeated_tests import RepeatedTests
from cfl.federation.replay_buffer import TOPIC as BUFFER_TOPIC
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.federation.server import Server
from cfl.federation.state_check import check_state
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.metrics.base import own_key
from cfl.metrics.measure import Measure
from cfl.metrics.own import OwnMatrix
from cfl.metrics.task_matrix import TaskMatrix
from cfl.privacy.release import Sample
from cfl.runtime.errors import ConfigError

FORMAT = 2
"""Format of a federation in checkpoints; increased whenever older files can no longer be read."""
BY_OWNER = "accuracy_by_owner"
"""Key of :attr:`Federation.by_owner` in checkpoints."""
OF_ALL = frozenset({MODEL_TOPIC, BUFFER_TOPIC, UPDATE})
"""Topics that do not belong to a method. Methods use their own names as topics, so these names are taken."""


class Federation:
    """Server, client states, methods and the figures measured so far.

    Args:
        model: the global model, and what clients keep of it.
        data: the tasks and their clients.
        methods: the composition of the run's methods.
        server: updates the network's parameters.
        channel: carries the messages between clients and server.
        buffer: settings of the clients' replay buffers; the defaults if not given.
        optimizer: an optimizer with the options of the clients' optimizers, to read them from; None if nothing is
            trained.
        own_measures: name -> metric that a user wants to be computed beside the run's measure.
        client_weighting: weight of a client's update: ``uniform`` (1) or ``samples`` (its number of training samples).

    Attributes:
        round: the next round to run, from 0.
        seconds: wall-clock seconds of all finished rounds, evaluation included.
        network: the global model; its parameters and buffers are the server's.
        clients: the states that clients keep between rounds.
        buffer: the clients' replay buffers, or None if no method uses them.
        curve: mean of the measure after each finished round, such as ACC in percent; None without an evaluation.
        stopped: whether the run ended before its last round, because it reached its targets or its privacy budget.
        measure: what is measured after each task; it follows from the scenario.
        measured: the matrix of this measure under the run's scenario; one matrix per client if models are personal.
        own_measures: name -> matrix of a user's measure.
        known: the matrix of this measure with the task of each test sample known; None if the run has no such matrix.
        by_owner: accuracies of the model that each client has, on the test samples that it owns; None before an
            evaluation, where the data do not say whose test samples are, and in runs that do not classify.
        optimizer: an optimizer with the options of the clients' optimizers; None if nothing is trained.
        repeated_tests: tensors of test batches that methods keep from one evaluation to the next.
        engine: the engine that computes local steps and the trial's measurements, for the summary; None before an
            engine is chosen.
    """

    def __init__(
        self,
        model: FederatedModel,
        data: FederatedDataModule,
        methods: MethodComposition,
        server: Server,
        channel: Channel,
        buffer: ReplayBuffer | None = None,
        optimizer: Optimizer | None = None,
        own_measures: Mapping[str, Metric] | None = None,
        client_weighting: Literal["uniform", "samples"] = "uniform",
    ) -> None:
        self.model, self.network, self.clients = model, model.network, model.clients
        self.data, self.methods = data, methods
        self.server, self.channel = server, channel
        self.optimizer, self.client_weighting = optimizer, client_weighting
        self.round = 0
        self.seconds = 0.0
        self.curve: list[float | None] = []
        self.stopped = False
        self.engine: dict[str, Any] | None = None
        self._pools: dict[int, tuple[int, ...]] = {}
        self.repeated_tests = RepeatedTests()
        methods.check(data)
        self.measure: Measure = data.measure
        self.buffer: ReplayBuffer | None = None
        if methods.replays:
            self.buffer = ReplayBuffer() if buffer is None else buffer
            self.buffer.bind(self.clients, data, methods.replays_logits)
        methods.setup(self)
        model.keep_initial()
        owners = data.num_clients if self.measures_clients else None
        empty = partial(self.measure.matrix, data.num_tasks, owners, data.num_outputs)
        self.measured: TaskMatrix = empty()
        has_known = self.measure.has_known(data.scenario, model.has_personal_models and methods.tells_tasks_apart)
        self.known: TaskMatrix | None = empty() if has_known else None
        targets, allowed = self.measure.targets, data.outputs.test_after(0)
        self.own_measures: dict[str, OwnMatrix] = {}
        for name, metric in (own_measures or {}).items():
            if targets not in ("classes", "numbers"):
                valid = f"none where runs measure {self.measure.words}"
                raise ConfigError(own_key(name), type(metric).__name__, valid)
            self.own_measures[name] = OwnMatrix(name, metric, targets == "classes", data.num_tasks, owners)
            self.own_measures[name].try_out(data.num_outputs, None if allowed is None else allowed[0])
        self.by_owner: AccuracyMatrix | None = None

    @property
    def accuracy(self) -> AccuracyMatrix:
        """:attr:`measured`, the accuracy matrix of a run that classifies; other runs raise RuntimeError."""
        if not isinstance(self.measured, AccuracyMatrix):
            raise RuntimeError(f"a run that measures {self.measure.words} has no accuracies")
        return self.measured

    @property
    def matrices(self) -> list[TaskMatrix]:
        """All matrices that an evaluation fills."""
        every = (self.measured, self.known, self.by_owner, *self.own_measures.values(), *self.methods.identified)
        return [matrix for matrix in every if matrix is not None]

    def measure_by_owner(self) -> None:
        """Make :attr:`by_owner` if the data say whose test samples are. Reads files."""
        if self.by_owner is None and self.measure.is_accuracy and self.data.tests_by_owner:
            self.by_owner = AccuracyMatrix(self.data.num_tasks, self.data.num_clients)

    @property
    def measures_clients(self) -> bool:
        """Whether there is a matrix per client: clients have their own models, tasks or clocks."""
        return self.model.has_personal_models or self.data.order is not None or self.schedule.client_clocks

    @property
    def schedule(self) -> BoundSchedule:
        """The schedule of rounds and sampled clients."""
        return self.data.rounds

    @property
    def finished(self) -> bool:
        """Whether the run is over: all rounds of all tasks are done, or the run has stopped early."""
        return self.stopped or self.round >= self.schedule.num_rounds

    @property
    def last_task(self) -> int:
        """Task of the last finished round; 0 before the first."""
        return self.schedule.task_of(max(self.round - 1, 0))

    def members(self, task: TaskRef) -> list[int]:
        """The clients that hold a task, ascending."""
        held: list[int] = self.data.members[unwrap_task(task)].tolist()
        return held

    def sample(self, plan: RoundPlan) -> Sample:
        """A round's clients, the clients that they were sampled from, and the sampling rate."""
        if self.schedule.client_clocks or plan.task not in self._pools:  # clients with own clocks leave within a task
            self._pools[plan.task] = tuple(self.schedule.present(plan.round).tolist())
        return Sample(plan.clients, self._pools[plan.task], self.schedule.sampling_rate(plan.round))

    def own_clients(self, task: TaskRef, clients: Sequence[int]) -> list[int]:
        """The clients of an extra round that this process computes.

        Args:
            task: the task whose data the clients use.
            clients: all clients of the extra round, the same in all processes. The channel expects messages from them.
        """
        self.channel.ask(clients)
        return self.data.own_clients(unwrap_task(task), clients)

    def synchronise(self) -> None:
        """Exchange byte counts, skipped clients and client states between processes. All processes must call this."""
        self.channel.synchronise()
        self.clients.synchronise()

    def client_storage(self) -> int:
        """Most bytes that a client stores between rounds: state of methods, personal parameters and buffers, and
        samples of tasks other than the current one."""
        tensors = self.model.state_tensors()
        own = payload_bytes({name: tensors[name] for name in self.model.personal})
        own += 0 if self.buffer is None else self.buffer.client_storage()
        own += bytes_of_other_tasks(self.data)
        return own + self.methods.client_storage()

    @property
    def computes_more_locally(self) -> bool:
        """Whether local training costs more than that of federated averaging on the current task's samples."""
        return samples_of_other_tasks(self.data) > 0 or self.methods.computes_locally

    def model_of(self, client: int, task: int | None) -> dict[str, Tensor]:
        """The model that a client uses for test samples of its ``task``-th task, or of an unknown task if None.

        The model's features are in the server's order."""
        own = {name: values[0] for name, values in self.model.personal_state((client,)).items()}
        return self.methods.recall(client, task, {**self.model.state_tensors(), **own})

    def model_for(self, task: TaskRef, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that is tested on a task, made from a model whose features are in the server's order.

        Without a method that has a model per task, ``model`` itself is returned."""
        return self.methods.model_for(unwrap_task(task), model)

    def state_dict(self) -> dict[str, Any]:
        """The state of the experiment without the global model, which is in the network's state dict."""
        return {
            "format": FORMAT,
            "round": self.round,
            "seconds": self.seconds,
            "curve": list(self.curve),
            "stopped": self.stopped,
            "server": self.server.state_dict(),
            "channel": self.channel.state_dict(),
            "clients": self.clients.state_dict(),
            "methods": self.methods.state_dict(),
            self.measure.name: self.measured.state_dict(),
            **({} if self.known is None else {self._known_key: self.known.state_dict()}),
            **{own_key(name): [own.definition, own.state_dict()] for name, own in self.own_measures.items()},
            **({} if self.by_owner is None else {BY_OWNER: self.by_owner.state_dict()}),
            "initial": {name: tensor.clone() for name, tensor in self.model.initial.items()},
            "fixed_weights": self.network.fixed_digest,
        }

    @property
    def _known_key(self) -> str:
        return f"{self.measure.name}{self.measure.known}"

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ConfigError: the state has another format, from another version of the code, or is of a run with other fixed
                weights.
            ValueError: it holds values that no run has (:func:`cfl.federation.state_check.check_state`).
        """
        if state.get("format") != FORMAT:
            valid = f"{FORMAT}: other states of the code wrote it, and the run is to be finished or tested with these"
            raise ConfigError("ckpt_path", f"a checkpoint of format {state.get('format', 1)}", valid)
        fixed = self.network.fixed_digest
        if state.get("fixed_weights", fixed) != fixed:
            value = "a checkpoint of a run with other fixed weights: the file model.network.weights has changed since"
            raise ConfigError("ckpt_path", value, "that run's file of weights, or a new run with this one")
        check_state(state, self.schedule.num_rounds, self.data.num_tasks, self.data.num_clients)
        self.repeated_tests.clear()
        self.round, self.seconds = state["round"], state["seconds"]
        self.curve, self.stopped = list(state["curve"]), state["stopped"]
        self.server.load_state_dict(state["server"])
        self.channel.load_state_dict(state["channel"])
        self.clients.load_state_dict(state["clients"])
        self.methods.load_state_dict(state["methods"])
        self.measured.load_state_dict(state[self.measure.name])
        if self.known is not None:
            self.known.load_state_dict(state[self._known_key])
        for name, own in self.own_measures.items():
            if (key := own_key(name)) in state:  # otherwise it has been added since
                definition, values = state[key]
                if definition != own.definition:
                    valid = f"{definition}, as in the checkpoint; another measure needs another name"
                    raise ConfigError(key, own.definition, valid)
                own.load_state_dict(values)
        if BY_OWNER in state:  # a checkpoint is restored without files, which measure_by_owner would read
            self.by_owner = AccuracyMatrix(self.data.num_tasks, self.data.num_clients)
            self.by_owner.load_state_dict(state[BY_OWNER])
        self.model.initial = dict(state["initial"])
