"""A method to check, with its settings, and the runs of it that several checks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.participation import Holders
from cfl.data.partitions import Dirichlet
from cfl.data.scenarios import Scenario
from cfl.data.streams import Stream
from cfl.engines import EngineOptions
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import Method
from cfl.runtime.errors import ConfigError
from cfl.testing.tiny_data import black_and_white, permuted, split, tiny_data
from cfl.testing.tiny_networks import NetworkFactory, double, norm_net
from cfl.testing.tiny_runs import OneStepAtATime, Rounds, fit, sgd, tiny_client

Which = Literal["tried", "neutral", "fedavg"]
"""The method, the method with options that switch it off, or federated averaging."""
Shares = Literal["equal", "unequal", "missing"]
"""How samples are dealt: equally; with partial batches and unequal steps; with tasks that clients lack."""
NAME = "tried"
"""Name of the method in the runs' ``methods``."""

_DEALT: dict[Shares, dict[str, Any]] = {
    "equal": {},
    "unequal": {
        "partition": Dirichlet(1.0, min_samples=3, balance=False),
        "schedule": {"batch_size": 4},
    },
    "missing": {
        "partition": Dirichlet(0.05, min_samples=0, balance=False),
        "participation": Holders(),
        "schedule": {"clients_per_round": 0.6},
    },
}


@dataclass(frozen=True)
class Run:
    """The results of a run; not to be changed, since several checks share it.

    Attributes:
        models: the global model after every round, name -> tensor.
        federation: the federation after the last round.
        method: the checked method after the run; None for federated averaging.
    """

    models: list[dict[str, Tensor]]
    federation: Federation
    method: Method | None

    def kept(self) -> dict[str, Any]:
        """The states of all clients, topic -> client -> tensors, independent of the order in which they were stored."""
        clients = self.federation.clients
        topics = sorted(clients.state_dict())
        return {topic: {client: clients.get(topic, client) for client in clients.holders(topic)} for topic in topics}


@dataclass(frozen=True, eq=False)
class MethodCase:
    """A method and the settings of its test runs.

    The runs have one to three tasks and five clients, three of them in each round. By default tasks are
    domain-incremental if the method allows that, else task- or class-incremental, else of densities.

    Attributes:
        make: makes the method, a fresh one with every call, with options under which it has an effect.
        reduces_to_fedavg: makes it with options under which it is federated averaging, bit for bit; None if there are
            no such options.
        network: the network.
        optimizer: makes the clients' optimizer from parameters.
        stream: number of tasks -> their stream.
        scenario: the scenario, if it does not follow from the stream.
        data: options of ``FederatedDataModule`` and, under ``schedule``, of ``Schedule``.
        federated: options of ``FederatedOrchestrator`` (``federated`` in a configuration).
        rounds: number of rounds of each task.
        beside: makes further methods, name -> method, which come after this one, and are used in the run of federated
            averaging as well.
        buffer: makes the settings of clients' buffers, for methods that replay.
        for_densities: makes the method for a network whose parameters are ``layers.*``, if ``density`` is among its
            scenarios and its options name layers; None: ``make``.
        wrong_options: each makes the method with an option that it must refuse.
        fedavg_in_first_task: whether it is federated averaging, bit for bit, until the first task is over; None: not
            checked.
        tolerance: greatest difference between two computations in float64 that count as the same.
        rough_tolerance: the same in float32.
        least_change: smallest change of a weight that counts as an effect of the method.
    """

    make: Callable[[], Method]
    reduces_to_fedavg: Callable[[], Method] | None = None
    network: NetworkFactory = norm_net
    optimizer: Any = sgd
    stream: Callable[[int], Stream] | None = None
    scenario: Scenario | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    federated: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 2
    beside: Callable[[], Mapping[str, Method]] = dict
    buffer: Callable[[], ReplayBuffer] | None = None
    for_densities: Callable[[], Method] | None = None
    wrong_options: Sequence[Callable[[], Method]] = ()
    fedavg_in_first_task: bool | None = None
    tolerance: float = 1e-8
    rough_tolerance: float = 2e-3
    least_change: float = 1e-3
    _runs: dict[tuple[Any, ...], Run] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        """Refuse a ``make`` that does not make methods, or returns the same object twice."""
        one, other = self.make(), self.make()
        if not isinstance(one, Method):
            raise TypeError(f"make returns {type(one).__name__}; it must make a cfl.methods.Method")
        if one is other:
            raise TypeError("make returns the same object twice; it must make a fresh method with every call")

    @property
    def who(self) -> str:
        """The name of the method's class, for messages."""
        return type(self.make()).__name__

    def tasks(self, number: int) -> Stream:
        """The stream with ``number`` tasks."""
        if self.stream is not None:
            return self.stream(number)
        scenarios = self.make().scenarios
        if "domain" in scenarios:
            return permuted(number)
        return split(number, classes=2 * number) if scenarios & {"task", "class"} else black_and_white(number)

    def of_scenario(self) -> Scenario | None:
        """The scenario as an option; None if it follows from the stream."""
        if self.scenario is not None or self.stream is not None:
            return self.scenario
        scenarios = self.make().scenarios
        if scenarios & {"domain", "task"}:
            return None
        return "class" if "class" in scenarios else "density"

    def data_of(self, tasks: int = 2, width: int = 2, shares: Shares = "equal", **options: Any) -> FederatedDataModule:
        """The data module with the federation's samples.

        Args:
            tasks: number of tasks.
            width: number of clients trained side by side.
            shares: how samples are dealt.
            options: options of ``FederatedDataModule``, and ``stream``; they override the case's own.
        """
        schedule: dict[str, Any] = {"rounds_per_task": self.rounds, "clients_per_round": 3}
        given: dict[str, Any] = {"num_clients": 5, "scenario": self.of_scenario()}
        for own in (self.data, _DEALT[shares], options):
            given |= own
            schedule |= own.get("schedule", {})
        schedule["cohort_width"] = width
        stream = given.pop("stream", None) or self.tasks(tasks)
        return tiny_data(stream, **{**given, "schedule": schedule})

    def methods(self, which: Which) -> dict[str, Method]:
        """New methods for a run.

        Raises:
            ValueError: there are no neutral options.
        """
        if which == "fedavg":
            return dict(self.beside())
        make = self.make if which == "tried" else self.reduces_to_fedavg
        if make is None:
            raise ValueError("no options make it federated averaging")
        return {NAME: make(), **self.beside()}

    def start(
        self,
        data: FederatedDataModule,
        methods: dict[str, Method],
        network: NetworkFactory | None = None,
        engine: Literal["vmap", "workers"] = "vmap",
        callbacks: Sequence[Callback] = (),
        ckpt_path: Path | None = None,
        federated: Mapping[str, Any] | None = None,
        **trainer: Any,
    ) -> Federation:
        """Run all rounds and return the federation; errors are passed on."""
        options = EngineOptions(engine, workers=2 if engine == "workers" else None)
        client = tiny_client(data, network or self.network, self.optimizer, methods, options)
        if self.buffer is not None:
            client.buffer = self.buffer()
        return fit(client, data, {**self.federated, **(federated or {})}, callbacks, ckpt_path, **trainer)

    def run(
        self,
        which: Which = "tried",
        *,
        tasks: int = 2,
        width: int = 2,
        engine: Literal["vmap", "workers"] = "vmap",
        in_double: bool = False,
        shares: Shares = "equal",
        network: NetworkFactory | None = None,
        accelerator: str = "cpu",
        one_by_one: bool = False,
    ) -> Run:
        """The results of a whole run, which is computed once and cached.

        Args:
            which: the method, its neutral options, or federated averaging.
            tasks: number of tasks.
            width: number of clients trained side by side.
            engine: what computes local steps.
            in_double: whether the network is in float64.
            shares: how samples are dealt.
            network: network in place of the case's.
            accelerator: the Trainer's.
            one_by_one: whether Lightning runs local steps one at a time.

        Raises:
            AssertionError: the run raised an error.
        """
        key = (which, tasks, width, engine, in_double, shares, network, accelerator, one_by_one)
        if key not in self._runs:
            made = network or self.network
            data, methods, watch = self.data_of(tasks, width, shares), self.methods(which), Rounds()
            try:
                network = double(made) if in_double else made
                callbacks = [watch, *([OneStepAtATime()] if one_by_one else [])]
                federation = self.start(data, methods, network, engine, callbacks, accelerator=accelerator)
            except Exception as error:
                precision = "float64" if in_double else "float32"
                dealt = {"equal": "", "unequal": ", unequal clients", "missing": ", tasks missing at clients"}[shares]
                where = f"{tasks} tasks, {width} clients side by side, {engine}, {accelerator}, {precision}{dealt}"
                raise AssertionError(f"training: {self._of(which)} fails ({where}): {error_text(error)}") from error
            self._runs[key] = Run(watch.models, federation, methods.get(NAME))
        return self._runs[key]

    def _of(self, which: Which) -> str:
        return {
            "tried": self.who,
            "neutral": f"{self.who} with the options of reduces_to_fedavg",
            "fedavg": "federated averaging on these data",
        }[which]


def error_text(error: BaseException) -> str:
    """Text of an error within a sentence: its class, unless that is ConfigError, and its message."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{kind}{error}"
