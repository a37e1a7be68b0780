"""Checks of a method's declarations: excluded settings are refused, others work. Each raises AssertionError."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from cfl.data.scenarios import EVERY_SCENARIO, Scenario
from cfl.data.sequences import RandomTasks
from cfl.data.streams import Permuted
from cfl.engines.cohort import Cohort
from cfl.federation.federation import OF_ALL, Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import Method
from cfl.methods.context import Context
from cfl.metrics.measure import measure_of
from cfl.models import MADE, TinyYOLO
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import difference, kind_of
from cfl.testing.method_case import NAME, MethodCase, error_text
from cfl.testing.tiny_data import black_and_white, brightness, permuted, source, split, squares
from cfl.testing.tiny_networks import NetworkFactory, double, norm_net
from cfl.testing.tiny_runs import Rounds, figures_of_every_run

_OPTIMIZERS = {
    kind.__name__: partial(kind, lr=0.01) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)
}


def scenarios_are_those_declared(case: MethodCase) -> None:
    """Require that runs in declared scenarios finish, and that runs in all other scenarios are refused.

    Declared scenarios in which a method beside it does not work are left out: these runs are refused because of that
    method.
    """
    declared = case.make().scenarios
    excluded = {
        scenario for scenario in declared for other in case.beside().values() if scenario not in other.scenarios
    }
    for scenario in get_args(Scenario):
        if scenario not in excluded and (scenario in declared or _can_be_tried(scenario)):
            scenario_is_as_declared(case, scenario)


def _can_be_tried(scenario: Scenario) -> bool:
    """Whether the packages that a scenario's measure needs are installed."""
    try:
        measure_of(scenario).require()
    except ConfigError:
        return False
    return True


def scenario_is_as_declared(case: MethodCase, scenario: Scenario) -> None:
    """Check one scenario for :func:`scenarios_are_those_declared`."""
    density = scenario == "density"
    streams = {"domain": permuted, "density": black_and_white, "regression": brightness, "detection": squares}
    without_labels = case.of_scenario() == "density"  # then the case's own network is for densities alone
    networks: dict[str, NetworkFactory] = {
        "density": case.network if without_labels else partial(MADE, hidden=[5]),
        "detection": partial(TinyYOLO, width=2),
    }
    network = networks.get(scenario, norm_net if without_labels else None)
    stream = streams.get(scenario, split)(2)
    make = case.for_densities if density and case.for_densities is not None else case.make
    methods = {NAME: make(), **case.beside()}
    data = case.data_of(stream=stream, scenario=scenario, num_clients=4, schedule={"rounds_per_task": 1})
    run = partial(case.start, data, methods, network)
    if scenario in methods[NAME].scenarios:
        _require_run(case, "scenarios", f"declares {scenario}", run)
    else:
        named = f"methods.{NAME} ({case.who})"
        _require_refusal(case, "scenarios", f"data.scenario {scenario}", run, "data.scenario", scenario, named)


def refuses_what_it_excludes(case: MethodCase) -> None:
    """Require that exposures, clocks, sequences and optimizers that the declarations exclude are refused.

    Other exposures, clocks, sequences and optimizers have to work, or the method itself refuses them by a ConfigError.
    """
    method = case.make()
    for options, key, allowed in (
        ({"exposure": "asynchronous"}, "data.exposure", method.task_free),
        ({"exposure": "joint"}, "data.exposure", not method.looks_back),
        ({"schedule": {"clock_spread": 0.5}}, "schedule.clock_spread", method.client_clocks),
        ({"sequences": RandomTasks(2)}, "data.sequences", not method.common_order),
    ):
        what = ", ".join(f"{name} {value}" for name, value in options.items())
        run = partial(_run_with, case, options)
        if allowed:
            _require_run(case, "declarations", f"does not exclude {what}", run, or_refusal=True)
        else:
            _require_refusal(case, "declarations", what, run, key)
    for name, optimizer in _OPTIMIZERS.items():
        run = partial(_run_with, case, {}, optimizer)
        if all(m.optimizers is None or name in m.optimizers for m in (method, *case.beside().values())):
            _require_run(case, "declarations", f"does not exclude model.optimizer {name}", run, or_refusal=True)
        elif method.optimizers is not None and name not in method.optimizers:
            _require_refusal(case, "declarations", f"model.optimizer {name}", run, "model.optimizer", name)


def refuses_wrong_options(case: MethodCase) -> None:
    """Options that cannot work are refused before training, by a ConfigError that names them."""
    for make in case.wrong_options:

        def run(make: Callable[[], Method] = make) -> None:
            case.start(case.data_of(), {NAME: make(), **case.beside()})

        _require_refusal(case, "options", f"what {make} makes", run, "methods.")


def server_sees_sums_only(case: MethodCase) -> None:
    """Require that the server never reads a single client's message, unless ``individual_uplinks`` is declared.

    In a round with several clients, sums have to be read after all of these have sent. This check does not detect data
    that a method takes from a cohort without the channel; the check with several processes does.
    """
    if case.make().individual_uplinks:
        return
    spy = _WatchesSums()
    methods = {"spy": spy, **case.methods("tried")}
    try:
        case.start(case.data_of(width=1), methods)
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, PermissionError):
            raise AssertionError(f"sums: {case.who} does not declare individual_uplinks, but {cause}") from error
        raise AssertionError(f"sums: {case.who} fails: {error_text(error)}") from error
    if spy.single:
        topic, round, senders, of = spy.single[0]
        raise AssertionError(
            f"sums: {case.who} does not declare individual_uplinks, but reads topic {topic!r} in round {round} when "
            f"only {senders} of {of} clients have sent; sums are to be read when all have, in end_round or end_task"
        )


def boundaries_are_unknown(case: MethodCase) -> None:
    """Require that a ``task_free`` method computes the same if six rounds on the same data are one task or three.

    This is checked for domain-incremental tasks only, because new classes show the boundaries of tasks, and only
    beside methods that are ``task_free``, because others compute something else.
    """
    method = case.make()
    alike = all(other.task_free for other in (method, *case.beside().values()))
    if not alike or "domain" not in method.scenarios:
        return
    models = []
    for rounds in ([6], [2, 3, 1]):
        data = case.data_of(
            stream=_Repeated(source(), len(rounds)),
            scenario="domain",
            repartition=False,
            schedule={"rounds_per_task": rounds, "clients_per_round": 1.0},
        )
        watch = Rounds()
        # A buffer that is offered each sample once would show which samples are new.
        whole = replace(case, buffer=lambda: ReplayBuffer(20, offered="every_step"))
        whole.start(data, case.methods("tried"), double(case.network), callbacks=[watch])
        models.append(watch.models[-1])
    differs = difference(models[1], models[0], case.tolerance)
    if differs:
        raise AssertionError(
            f"task_free: {case.who} computes something else when the same rounds are called three tasks "
            f"instead of one: {differs}"
        )


def reports_are_plain_values(case: MethodCase) -> None:
    """The figures and rows of ``report`` are plain values that JSON gives back; all rows have the same columns.

    No figure may have the name of a figure that every run has.
    """
    for tasks in (1, 3):
        run = case.run(tasks=tasks)
        method = run.method
        assert method is not None
        told = method.report()
        taken = sorted(set(told.figures) & figures_of_every_run(run.federation))
        if taken:
            raise AssertionError(f"reports: figures of {case.who} have names of figures of every run: {taken}")
        for what, report in (("figures", told.figures), ("rows", told.rows)):
            try:
                same = json.loads(json.dumps(report, allow_nan=False)) == report
            except (TypeError, ValueError) as error:
                raise AssertionError(f"reports: {what} of {case.who} hold more than plain values: {error}") from error
            if not same:
                raise AssertionError(f"reports: {what} of {case.who} are not what JSON gives back: {report}")
        columns = sorted({tuple(row) for row in told.rows})
        if len(columns) > 1:
            raise AssertionError(f"reports: rows of {case.who} have other columns: {columns}")


def storage_is_declared(case: MethodCase) -> None:
    """``client_storage`` counts the states that clients keep for the method between rounds."""
    run = case.run(tasks=3)
    method, federation = run.method, run.federation
    assert method is not None
    stored = method.client_storage()
    if not isinstance(stored, int) or stored < 0:
        raise AssertionError(f"storage: client_storage of {case.who} is {stored!r}, not a number of bytes")
    kept = set(federation.clients.state_dict())
    own = sorted(kept - OF_ALL - set(case.beside()))
    if own and not stored:
        raise AssertionError(f"storage: clients keep {own} for {case.who}, but its client_storage is 0")
    if federation.client_storage() < stored or (kept and not federation.client_storage()):
        raise AssertionError(
            f"storage: clients keep {sorted(kept)}, and the federation counts {federation.client_storage()} bytes"
        )


def shapes_are_right(case: MethodCase) -> None:
    """Require that returned tensors have the shapes of the arguments; otherwise they could broadcast unnoticed."""
    methods = case.methods("tried")
    method: Any = methods[NAME]
    for name in ("transform_step", "model_for", "recall", "as_tested"):
        if hasattr(method, name):
            setattr(method, name, partial(_same_shapes, case, name, getattr(method, name)))
    try:
        case.start(case.data_of(), methods)
    except Exception as error:
        if isinstance(found := _cause(error), _WrongShape):
            raise AssertionError(f"shapes: {found}") from error
        raise AssertionError(f"shapes: {case.who} fails: {error_text(error)}") from error


class _WrongShape(Exception):
    """A message about the shape of a returned tensor."""


def _same_shapes(
    case: MethodCase, name: str, function: Callable[..., dict[str, Tensor]], *given: Any
) -> dict[str, Tensor]:
    """The result of ``function``, name -> tensor, if it has the shapes of the last argument."""
    shapes = {n: kind_of(value) for n, value in given[-1].items()}
    returned = function(*given)
    for n, value in returned.items():
        if n in shapes and kind_of(value) != shapes[n]:
            raise _WrongShape(f"{name} of {case.who} gives {n} as {kind_of(value)} instead of {shapes[n]}")
    return returned


def _cause(error: BaseException) -> BaseException:
    """The first error of a chain in which each error was raised from the one before."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Repeated(Permuted):
    """A stream that repeats one task."""

    def pixel_map(self, task: int, seed: int) -> Tensor | None:
        return None


class _WatchesSums(Method):
    """Records sums that the server reads while clients of the round still train, or that hold a single client.

    It works in every run, so that only the checked method decides which runs there can be.
    """

    scenarios = EVERY_SCENARIO
    task_free = True
    client_clocks = True

    def __init__(self) -> None:
        self.single: list[tuple[str, int, int, int]] = []
        self._round, self._clients = -1, 0
        self._training: set[int] = set()

    def setup(self, context: Context) -> None:
        super().setup(context)
        shown: Any = context  # a view without tasks, whose channel knows this method's topics only
        channel, sent = shown._behind._federation.channel, dict[str, set[int]]()
        uplink, read = channel.uplink, channel._read

        def noting(
            topic: str,
            payload: Mapping[str, Tensor],
            weights: Sequence[float],
            clients: Sequence[int],
            wire_bytes: int | None = None,
        ) -> list[bool]:
            sent.setdefault(topic, set()).update(clients)
            return uplink(topic, payload, weights, clients, wire_bytes)

        def reading(topic: str) -> tuple[dict[str, Tensor], float, dict[str, torch.dtype]]:
            senders = len(sent.pop(topic, ()))
            if self._clients > 1 and (self._training or senders == 1):
                self.single.append((topic, self._round, senders, self._clients))
            return read(topic)

        # Replaced on the run's own channel, so that all calls are recorded: sum and mean call _read.
        channel.uplink, channel._read = noting, reading

    def start_clients(self, cohort: Cohort) -> None:
        if cohort.round != self._round:
            everyone = self.context.plan(cohort.round).clients
            self._round, self._clients, self._training = cohort.round, len(everyone), set(everyone)

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self._training -= {cohort.clients[p] for p in positions}


def _run_with(case: MethodCase, options: Mapping[str, Any], optimizer: Any = None) -> Federation:
    changed = case if optimizer is None else replace(case, optimizer=optimizer)
    return changed.start(changed.data_of(**options), changed.methods("tried"))


def _require_run(
    case: MethodCase, what: str, declared: str, run: Callable[[], Federation], or_refusal: bool = False
) -> None:
    try:
        finished = run().finished
    except Exception as error:
        if or_refusal and isinstance(error, ConfigError):
            return
        raise AssertionError(f"{what}: {case.who} {declared}, but fails there: {error_text(error)}") from error
    if not finished:
        raise AssertionError(f"{what}: {case.who} {declared}, but the run ends before its last round")


def _require_refusal(
    case: MethodCase,
    what: str,
    given: str,
    run: Callable[[], Any],
    key: str,
    value: object = None,
    named: str = "",
) -> None:
    """Require a ConfigError whose key begins with ``key``, with ``value`` if given, a valid value, and ``named``."""
    try:
        run()
    except ConfigError as error:
        right = error.key.startswith(key) and bool(error.valid) and value in (None, error.value)
        if not right or named not in str(error):
            wanted = f"{key}, the value and what is valid" + (f" while there is {named}" if named else "")
            raise AssertionError(f"{what}: {case.who} refuses {given} without naming {wanted}: {error}") from error
        return
    except Exception as error:
        raise AssertionError(
            f"{what}: {case.who} answers {given} by no ConfigError but by {error_text(error)}"
        ) from error
    raise AssertionError(f"{what}: {case.who} does not refuse {given}")


DECLARATIONS: dict[str, Callable[[MethodCase], None]] = {
    "scenarios": scenarios_are_those_declared,
    "declarations": refuses_what_it_excludes,
    "options": refuses_wrong_options,
    "sums": server_sees_sums_only,
    "shapes": shapes_are_right,
    "task_free": boundaries_are_unknown,
    "reports": reports_are_plain_values,
    "storage": storage_is_declared,
}
"""Name of a property -> its check."""
