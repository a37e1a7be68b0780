"""The state of an experiment between two rounds, which is what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cfl.data.datamodule import FederatedDataModule
from cfl.data.kept_samples import kept_bytes, kept_samples
from cfl.data.schedule import BoundSchedule, RoundPlan
from cfl.data.task_handles import TaskRef, unwrap_task
from cfl.engines.cohort import Cohort
from cfl.federation.channel import Channel, payload_bytes
from cfl.federation.client_states import ClientStates
from cfl.federation.method_protocol import MethodComposition
from cfl.federation.repeated_tests import RepeatedTests
from cfl.federation.replay_buffer import TOPIC as BUFFER_TOPIC
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.federation.server import Server
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.metrics.measure import Measure, giving, measure_of
from cfl.metrics.task_matrix import TaskMatrix
from cfl.metrics.transfer import average_accuracy
from cfl.privacy.release import Sample
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError

T = TypeVar("T")
FORMAT = 2
"""Format of a federation in checkpoints; increased whenever older files can no longer be read."""
MODEL_TOPIC = "model"
"""Topic of the clients' personal parameters and buffers."""
OF_ALL = frozenset({MODEL_TOPIC, BUFFER_TOPIC})
"""Topics of clients' states that do not belong to a method; methods use their names as topics."""


def state_buffers(network: nn.Module) -> list[str]:
    """Names of the buffers that are part of a model, as its state dict has them.

    Buffers registered with ``persistent=False`` are constants. They are not sent, averaged or checked.

    Raises:
        ConfigError: a buffer holds NaN or infinity.
    """
    state = network.state_dict()
    buffers = {name: tensor for name, tensor in network.named_buffers() if name in state}
    for name, tensor in buffers.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            valid = (
                "finite values in what clients and server exchange; persistent=False for a buffer that is a constant"
            )
            raise ConfigError("model.network", f"{type(network).__name__}, whose buffer {name} has others", valid)
    return list(buffers)


class Federation:
    """Server, client states, methods and the figures measured so far.

    Args:
        network: the global model; its parameters and buffers are the server's.
        data: the tasks and their clients.
        methods: the composition of the run's methods.
        server: updates the network's parameters.
        channel: carries the messages between clients and server.
        batchnorm: what happens to BatchNorm's running statistics after local training. ``average``: they are averaged
            like weights. ``local``: every client keeps its own and never sends them. ``drop``: they are discarded.
            A global model without statistics is evaluated with those of the test batch.
        clients: storage of the clients' states; in memory only if not given.
        buffer: settings of the clients' replay buffers; the defaults if not given.
        frozen: names of parameters that are not trained. They are on the model's device and are never sent.
        optimizer: an optimizer like those of the clients, to read its options from; None if nothing is trained.

    Attributes:
        round: the next round to run, from 0.
        seconds: wall-clock seconds of all finished rounds, evaluation included.
        clients: the states that clients keep between rounds.
        buffer: the clients' replay buffers, or None if no method uses them.
        curve: mean of the measure after each finished round, such as ACC in percent; None without an evaluation.
        stopped: whether the run ended before its last round because it reached its targets.
        measure: what is measured after each task; it follows from the scenario.
        measured: the matrix of this measure under the run's scenario; one matrix per client if models are personal.
        known: the same with the task of each test sample known, if the measure has it in such a run; else None.
        optimizer: an optimizer like those of the clients, to read its options from; None if nothing is trained.
        repeated_tests: what methods keep of test batches from one evaluation to the next.
        engine: for the summary: the engine that computes local steps and the trial's measurements; None before it.
        frozen: names of parameters that are neither trained nor sent.
        personal: names of parameters and buffers that stay on their client from round to round.
        shared_parameters: names of the parameters that clients and server exchange.
        shared_buffers: names of the buffers that clients and server exchange.
    """

    def __init__(
        self,
        network: nn.Module,
        data: FederatedDataModule,
        methods: MethodComposition,
        server: Server,
        channel: Channel,
        batchnorm: Literal["average", "local", "drop"] = "average",
        clients: ClientStates | None = None,
        buffer: ReplayBuffer | None = None,
        frozen: Collection[str] = (),
        optimizer: Optimizer | None = None,
    ) -> None:
        self.network, self.data, self.methods = network, data, methods
        self.frozen = frozenset(frozen)
        self.optimizer = optimizer
        self.batchnorm = batchnorm
        self.server, self.channel = server, channel
        self.clients = ClientStates() if clients is None else clients
        self.round = 0
        self.seconds = 0.0
        self.curve: list[float | None] = []
        self.stopped = False
        self.engine: dict[str, Any] | None = None
        self._pools: dict[int, tuple[int, ...]] = {}
        self.repeated_tests = RepeatedTests()
        methods.check(data)
        self.measure: Measure = data.measure
        check_network(network, data.scenario)
        parameters = [n for n, _ in network.named_parameters()]
        buffers = state_buffers(network)
        candidates = parameters if batchnorm == "drop" else parameters + buffers
        kept = {n for n in candidates if methods.keeps_local(n)}
        self.personal = frozenset(kept | set(buffers) if batchnorm == "local" else kept)
        self.shared_parameters = tuple(n for n in parameters if n not in self.personal and n not in frozen)
        self.shared_buffers = tuple(n for n in buffers if n not in self.personal and batchnorm == "average")
        self.buffer: ReplayBuffer | None = None
        if methods.replays:
            self.buffer = ReplayBuffer() if buffer is None else buffer
            self.buffer.bind(self.clients, data, methods.replays_logits)
        methods.setup(self)
        owners = data.num_clients if self.measures_clients else None
        empty = partial(self.measure.matrix, data.num_tasks, owners, data.num_outputs)
        self.measured: TaskMatrix = empty()
        has_known = self.measure.has_known(data.scenario, self.has_personal_models and methods.tells_tasks_apart)
        self.known: TaskMatrix | None = empty() if has_known else None
        self._initial = {n: t.detach().clone() for n, t in self.state_tensors().items() if n in self.personal}

    @property
    def accuracy(self) -> AccuracyMatrix:
        """:attr:`measured` of a run that classifies."""
        if not isinstance(self.measured, AccuracyMatrix):
            raise RuntimeError(f"a run that measures {self.measure.words} has no accuracies")
        return self.measured

    @property
    def matrices(self) -> list[TaskMatrix]:
        """All matrices that an evaluation fills."""
        return [m for m in (self.measured, self.known, *self.methods.identified) if m is not None]

    @property
    def has_personal_models(self) -> bool:
        """Whether clients have parameters of their own, so that each client's model is evaluated."""
        return any(name in self.personal for name, _ in self.network.named_parameters())

    @property
    def measures_clients(self) -> bool:
        """Whether there is a matrix per client: clients have their own models, tasks or clocks."""
        return self.has_personal_models or self.data.order is not None or self.schedule.client_clocks

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

    def rows_due(self, everyone: bool) -> dict[int | None, int]:
        """Clients to evaluate, and the matrix row that each fills: the row of the client's current task.

        Args:
            everyone: all clients; otherwise, if clients have their own clocks, only those whose task has just ended.

        Returns:
            Client -> row; or None -> row if there is one matrix for all clients.
        """
        if not self.measures_clients:
            return {None: self.last_task}
        last = max(self.round - 1, 0)
        clients = list(range(self.data.num_clients))
        if self.schedule.client_clocks:
            clients = self.members(0) if everyone else self.schedule.due(self.schedule.round(last))
        return {client: self.schedule.task_at(last, client) for client in clients}

    def last_whole_row(self) -> int | None:
        """The last task after which all clients have been evaluated, or None. Clients with their own clocks finish a
        task in different rounds."""
        evaluated = ~self.measured.compute().isnan().all(-1)
        if self.schedule.client_clocks:
            evaluated = evaluated[self.members(0)].all(0)
        elif self.measures_clients:
            evaluated = evaluated.any(0)
        return max(evaluated.nonzero().flatten().tolist(), default=None)

    def figures(self, matrix: TaskMatrix) -> dict[str, float | None]:
        """ACC, FGT and the other figures of one of :attr:`matrices` after :meth:`last_whole_row`; see
        :meth:`cfl.metrics.task_matrix.TaskMatrix.summary`."""
        row = self.last_whole_row()
        return dict.fromkeys(self.measure.formulas) if row is None else matrix.summary(after=row)

    def means(self) -> list[float]:
        """Mean of the measure after each task, such as ACC, up to :meth:`last_whole_row`, NaN where not evaluated.

        With a matrix per client it is the mean over the clients for which the figure is defined. If some clients do not
        hold every task, this differs from the figure of the mean matrix.
        """
        matrix, row = self.measured.compute(), self.last_whole_row()
        known = range(0 if row is None else row + 1)
        means = [average_accuracy(matrix, after=t).nanmean().item() for t in known]
        return means + [math.nan] * (self.data.num_tasks - len(means))

    def members(self, task: TaskRef) -> list[int]:
        """The clients that hold a task, ascending."""
        held: list[int] = self.data.members[unwrap_task(task)].tolist()
        return held

    def sample(self, plan: RoundPlan) -> Sample:
        """A round's clients, and how they were chosen."""
        if self.schedule.client_clocks or plan.task not in self._pools:  # with own clocks clients leave within a task
            self._pools[plan.task] = tuple(self.schedule.present(plan.round).tolist())
        return Sample(plan.clients, self._pools[plan.task], self.schedule.sampling_rate(plan.round))

    def own_clients(self, task: TaskRef, clients: Sequence[int]) -> list[int]:
        """The clients among these that this process computes, in an extra round.

        Args:
            task: the task whose data they use.
            clients: the same in all processes; the channel expects the messages that follow from them.
        """
        self.channel.ask(clients)
        return self.data.own_clients(unwrap_task(task), clients)

    def everyones(self, value: T) -> list[T]:
        """Collect a value from every process, by rank. All processes must call this.

        Args:
            value: small; plain values, such as the figures of this process's clients.
        """
        return distributed.gather(value)

    def at_server(self, compute: Callable[[], T]) -> T:
        """Run a computation of the server in the first process and return its result in all processes.

        It is computed once because rounding may differ between processes. All processes must call this.

        Args:
            compute: returns tensors, plain values, and dictionaries, lists and tuples of these. With several processes
                the returned tensors are on the CPU.
        """
        if distributed.count() == 1:
            return compute()
        return distributed.from_first(cast(T, _on_cpu(compute()) if distributed.rank() == 0 else None))

    def synchronise(self) -> None:
        """Exchange byte counts, skipped clients and client states between processes. All processes must call this."""
        self.channel.synchronise()
        self.clients.synchronise()

    def client_storage(self) -> int:
        """Most bytes that a client stores between rounds: state of methods, personal parameters and buffers, and
        samples of tasks other than the current one."""
        tensors = self.state_tensors()
        own = payload_bytes({name: tensors[name] for name in self.personal})
        own += 0 if self.buffer is None else self.buffer.client_storage()
        own += kept_bytes(self.data)
        return own + self.methods.client_storage()

    @property
    def computes_more_locally(self) -> bool:
        """Whether local training costs more than that of federated averaging on the current task's samples."""
        return kept_samples(self.data) > 0 or self.methods.computes_locally

    def state_tensors(self) -> dict[str, Tensor]:
        """The global model's parameters and buffers by name (not copied)."""
        return {**dict(self.network.named_parameters()), **dict(self.network.named_buffers())}

    def trained_tensors(self, cohort: Cohort, positions: Sequence[int]) -> dict[str, Tensor]:
        """The trained tensors that these clients of a cohort send or keep, name -> ``[k, ...]``. If any tensor of a
        client is not finite, the client is left out of the round (:meth:`cfl.federation.channel.Channel.usable`)."""
        names = (*self.shared_parameters, *self.shared_buffers, *self.personal)
        tensors = {**cohort.parameters, **cohort.buffers}
        return cohort.rows(positions, {name: tensors[name] for name in names})

    def personal_state(self, clients: tuple[int, ...]) -> dict[str, Tensor]:
        """Parameters and buffers that these clients never send, name -> ``[k, ...]``; at first the initial values."""
        tensors = self.state_tensors()  # on the network's device, which may have changed since the initial values
        initial = {name: value.to(tensors[name].device) for name, value in self._initial.items()}
        return self.clients.gather(MODEL_TOPIC, clients, initial)

    def model_of(self, client: int, task: int | None) -> dict[str, Tensor]:
        """The model that a client uses for test images of its ``task``-th task, or of an unknown task if None.

        Features are in the server's order."""
        own = {name: values[0] for name, values in self.personal_state((client,)).items()}
        return self.methods.recall(client, task, {**self.state_tensors(), **own})

    def shared_tensors(self) -> dict[str, Tensor]:
        """The message that carries the global model to a client: name -> tensor (not copied)."""
        tensors = self.state_tensors()
        return {name: tensors[name] for name in (*self.shared_parameters, *self.shared_buffers)}

    def model_for(self, task: TaskRef, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that is tested on a task, made from one in the server's order.

        The same object is returned unless a method has a model per task."""
        return self.methods.model_for(unwrap_task(task), model)

    @contextmanager
    def evaluation_statistics(self) -> Iterator[None]:
        """Within the context, BatchNorm uses the test batch's statistics if the evaluated model has none."""
        layers = [m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        has_own = self.batchnorm == "average" or (self.batchnorm == "local" and self.has_personal_models)
        if has_own or not layers:
            yield
            return
        saved = [(m, m.training, m.running_mean, m.running_var, m.num_batches_tracked) for m in layers]
        try:
            for layer in layers:
                layer.train(True)
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            yield
        finally:
            for layer, training, mean, var, count in saved:
                layer.train(training)
                layer.running_mean, layer.running_var, layer.num_batches_tracked = mean, var, count

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
            "initial": {name: tensor.clone() for name, tensor in self._initial.items()},
            "fixed_weights": self.network.fixed_digest,
        }

    @property
    def _known_key(self) -> str:
        return f"{self.measure.name}{self.measure.known}"

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ConfigError: it has another format, from an earlier or later version of the code, or other fixed weights.
        """
        if state.get("format") != FORMAT:
            valid = f"{FORMAT}: other states of the code wrote it, and the run is to be finished or tested with these"
            raise ConfigError("ckpt_path", f"a checkpoint of format {state.get('format', 1)}", valid)
        fixed = self.network.fixed_digest
        if state.get("fixed_weights", fixed) != fixed:
            value = "a checkpoint of a run with other fixed weights: the file model.network.weights has changed since"
            raise ConfigError("ckpt_path", value, "that run's file of weights, or a new run with this one")
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
        self._initial = dict(state["initial"])


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.cpu()
    if isinstance(tree, dict):
        return {key: _on_cpu(value) for key, value in tree.items()}
    return type(tree)(map(_on_cpu, tree)) if type(tree) in (list, tuple) else tree


def check_network(network: nn.Module, scenario: str) -> None:
    """Refuse a network that gives something else than the scenario's measure needs.

    Raises:
        ConfigError: such as a classifier in a density run, or a density network in a classification run.
    """
    name, wanted, found = type(network).__name__, measure_of(scenario), getattr(network, "predicts", "vector")
    if found == wanted.predicts:
        return
    others = [other for measure in giving(found) for other in measure.scenarios]
    if wanted.predicts != "vector" or not others:
        raise ConfigError("model.network", name, wanted.network)
    raise ConfigError("data.scenario", scenario, f"{' or '.join(others)} with model.network {name}")
