"""Methods that are wrong on purpose: each is caught, and the sentence says what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cfl.data.samples import Samples
from cfl.data.scenarios import Scenario
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.methods import FedProx, Method
from cfl.methods.base import Report
from cfl.methods.context import Context
from cfl.metrics.measures.detection import Detection
from cfl.models import MADE
from cfl.runtime.errors import ConfigError
from cfl.testing import PROPERTIES, check_method
from cfl.testing.comparing import distance
from cfl.testing.method_case import MethodCase
from cfl.testing.tiny_data import black_and_white, brightness
from cfl.testing.tiny_networks import double, mlp, norm_net


class Decays(Method):
    """A correct method: pulls weights towards zero in local steps, twice as hard after the first task."""

    looks_back: ClassVar[bool] = True
    state = ("ended",)

    def __init__(self, strength: float = 0.1) -> None:
        if strength < 0:
            raise ConfigError("methods.decays.strength", strength, "a number of at least 0")
        self.strength, self.ended = strength, 0

    def adjust_gradients(self, cohort: Cohort) -> None:
        for name, gradient in cohort.gradients.items():
            gradient.add_(cohort.parameters[name].detach(), alpha=self.strength * (1 + self.ended))

    def end_task(self, plan: RoundPlan) -> None:
        self.ended += 1


def test_a_right_method_passes() -> None:
    wrong = (partial(Decays, strength=-1.0),)
    check_method(
        Decays, reduces_to_fedavg=partial(Decays, 0.0), wrong_options=wrong, fedavg_in_first_task=False, processes=2
    )


class DependsOnWidth(Decays):
    """Divides by the number of clients that happen to be trained side by side."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values():
            gradient.div_(len(cohort.clients))


class DependsOnNeighbours(Decays):
    """Mixes the clients of a cohort in what they keep, which does not change the weights."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients = [cohort.clients[p] for p in positions]
        everyones = cohort.parameters["head.bias"].detach().mean(0)
        self.context.clients.scatter("mean", clients, {"bias": everyones.expand(len(clients), -1)})

    def client_storage(self) -> int:
        return 16


class HidesItsChanges(Decays):
    """Changes gradients and says that it does not."""

    changes_gradients = False


class ForgetsItsState(Decays):
    """Saves what it does not restore."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SavesNothing(Decays):
    """Has a state and saves none."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class SavesAnObject(Decays):
    """Saves an object that only pickle can read."""

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "self": RoundPlan(0, 0, 0, (), False)}


class DoesNothing(Method):
    """Federated averaging."""


class NotQuiteNeutral(Decays):
    """Still changes gradients a little with a strength of 0."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        for name, gradient in cohort.gradients.items():
            gradient.add_(cohort.parameters[name].detach(), alpha=self.strength + 1e-7)


class AddsNothing(Method):
    """Is federated averaging, but has its loss computed by other operations."""

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        return 0.0 * logits.sum()


class ReadsSingleMessages(Decays):
    """Reads a mean as soon as one cohort has sent, before the other clients have."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients = [cohort.clients[p] for p in positions]
        bias = cohort.rows(positions, {"bias": cohort.parameters["head.bias"]})
        self.context.channel.uplink("bias", bias, [1.0] * len(clients), clients)
        self.context.channel.mean("bias")


class ReadsMomentum(Decays):
    """Works with SGD alone, and does not say so."""

    def start_clients(self, cohort: Cohort) -> None:
        super().start_clients(cohort)
        assert self.context.optimizer.param_groups[0]["momentum"] == 0


class AsksClientsOneByOne(Decays):
    """Reads a sum after each client's message at a task's end."""

    def end_task(self, plan: RoundPlan) -> None:
        super().end_task(plan)
        for client in self.context.extra_round(plan.task, plan.clients):
            self.context.channel.uplink("one", {"number": torch.ones(1)}, [1.0], [client])
            self.context.channel.sum("one")


class SendsSingleMessages(Decays):
    """Lets the server see single clients' messages without declaring it."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients = [cohort.clients[p] for p in positions]
        bias = cohort.rows(positions, {"bias": cohort.parameters["head.bias"]})
        self.context.channel.uplink_individually("bias", bias, clients)


class HoardsUpdates(Method):
    """Reads clients' trained weights from the cohort instead of the channel."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        self.seen += cohort.parameters["head.bias"].detach()[list(positions)].norm(dim=1).tolist()

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values():
            gradient.mul_(1 + sum(self.seen) if cohort.round else 0.5)

    def end_round(self, plan: RoundPlan) -> None:
        self.seen = [sum(sorted(self.seen))]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class CannotDoClasses(Decays):
    """Declares scenarios in which it fails."""

    def begin_task(self, plan: RoundPlan) -> None:
        if self.context.scenario == "class":
            raise KeyError("class")


class TakesDensities(Decays):
    """Declares the scenario ``density``, but reads accuracies, which that scenario does not have."""

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain", "density"})

    def end_task(self, plan: RoundPlan) -> None:
        super().end_task(plan)
        self.context.accuracy  # noqa: B018


class TakesAnyStrength(Decays):
    """Does not refuse a negative strength."""

    def __init__(self, strength: float = 0.1) -> None:
        super().__init__(abs(strength))


class RefusesWithoutWords(Decays):
    """Refuses by an error that does not say what would be valid."""

    def __init__(self, strength: float = 0.1) -> None:
        if strength < 0:
            raise ValueError("no")
        super().__init__(strength)


class NamesNoKey(Decays):
    """Refuses by a ConfigError that does not name the option's full key."""

    def __init__(self, strength: float = 0.1) -> None:
        if strength < 0:
            raise ConfigError("strength", strength, "another")
        super().__init__(strength)


class ScalarPenalty(Method):
    """Returns one number for all clients."""

    def penalty(self, cohort: Cohort) -> Tensor:
        return sum(w.square().sum() for w in cohort.parameters.values())  # type: ignore[return-value]


class LosesWeights(Method):
    """Returns a step without all parameters."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in step.items() if "head" in name}


class ChangesShape(Method):
    """Returns a step of another shape, which would be broadcast over the weights."""

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.mean(0, keepdim=True) for name, value in step.items()}


class KnowsTheTask(Decays):
    """Declares itself free of tasks, but computes with the number of the present task."""

    task_free = True
    looks_back: ClassVar[bool] = False
    end_task = Method.end_task

    def start_clients(self, cohort: Cohort) -> None:
        self.ended = int(self.context._behind.task_of(cohort.round))  # type: ignore[attr-defined]


class ReportsPlainly(Decays):
    """Returns a dict instead of a Report."""

    def report(self) -> Any:
        return {"share": 0.5}


class ReportsAccuracies(Method):
    """Reports a figure under a name that every run uses itself."""

    def report(self) -> Report:
        return Report({"acc": 50.0, "model_bytes": 8})


class ReportsTensors(Decays):
    """Puts a tensor into its report."""

    def report(self) -> Report:
        return Report({"strength": torch.tensor(self.strength)})


class ChangesColumns(Decays):
    """Reports rows with other columns."""

    def report(self) -> Report:
        return Report(rows=[{f"task {task}": 1} for task in range(self.ended)])


class KeepsWithoutSaying(Decays):
    """Lets clients keep a tensor that ``client_storage`` does not count."""

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients = [cohort.clients[p] for p in positions]
        self.context.clients.scatter("rounds", clients, {"ones": torch.ones(len(clients), 1)})


class DividesBySamples(Decays):
    """Assumes that every client has samples of every task."""

    def end_task(self, plan: RoundPlan) -> None:
        super().end_task(plan)
        for client in range(self.context.num_clients):
            next(iter(self.context.client_batches(plan.task, client, 8, torch.device("cpu"))))


class ForgetsItsTable(Decays):
    """Saves all that training depends on, but not what it reports."""

    def report(self) -> Report:
        return Report(rows=[{"task": task} for task in range(getattr(self, "begun", 0))])

    def begin_task(self, plan: RoundPlan) -> None:
        self.begun = plan.task + 1


class FailsWhereAllTasksAreOne(Decays):
    """Does not declare that it looks back, but fails when all tasks are trained as one."""

    looks_back: ClassVar[bool] = False

    def begin_task(self, plan: RoundPlan) -> None:
        if self.context.exposure == "joint":
            raise RuntimeError("no end")


class CountsTwoTasks(Method):
    """Has an option that must be the number of tasks."""

    def setup(self, context: Context) -> None:
        super().setup(context)
        if context.num_tasks > 2:
            raise ConfigError(f"{self.key}.tasks", 2, f"at least {context.num_tasks}")


class PullsTooMuch(Method):
    """Gives an anchor of another shape, which would be broadcast over the weights."""

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        return {"head.weight": Pull(1.0, cohort.global_parameters["head.weight"].mean(0, keepdim=True))}


WRONG: list[tuple[str, type[Method], dict[str, Any], str]] = [
    ("width", DependsOnWidth, {}, r"^width: DependsOnWidth computes something else with 2 clients side by side .* 1: "),
    ("width", DependsOnNeighbours, {}, r"^width: .* what clients keep\.mean\.\d\.bias differs by 0\.\d+ \(1e-08 all"),
    ("engines", HidesItsChanges, {}, r"^engines: HidesItsChanges .* engine\.kind workers instead of vmap: .* by \d"),
    (
        "resuming",
        ForgetsItsState,
        {},
        r"^resuming: .* interrupted after 2 of 6 rounds: methods\.tried\.ended is 2 inst",
    ),
    (
        "resuming",
        SavesNothing,
        {},
        r"^resuming: SavesNothing .* after 2 of 6 rounds: .* differs by .*; its state has to name",
    ),
    (
        "resuming",
        SavesAnObject,
        {},
        r"^resuming: the state_dict of SavesAnObject must hold tensors and plain values al",
    ),
    ("resuming", CountsTwoTasks, {}, r"^resuming: CountsTwoTasks fails in a run of three tasks: methods\.tried\.tasks"),
    ("state", ForgetsItsTable, {}, r"^state: ForgetsItsTable restores other rows of its report than it saved: "),
    ("effect", DoesNothing, {}, r"^effect: DoesNothing ends where federated averaging ends, up to 0 in any weight"),
    (
        "reduction",
        NotQuiteNeutral,
        {"reduces_to_fedavg": partial(NotQuiteNeutral, 0.0)},
        r"^reduction: NotQuiteNeutral .* is not federated averaging: after round 0 of 4, [\w.]+ differs by [\de.-]+$",
    ),
    (
        "reduction",
        AddsNothing,
        {"reduces_to_fedavg": AddsNothing},
        r"^reduction: AddsNothing .* differs by .*; it is in float64, up to rounding: .* Declare reweighs_added_only",
    ),
    (
        "first task",
        Decays,
        {"fedavg_in_first_task": True},
        r"^first task: Decays is said .* but after round 0 of 2, [\w.]+ differs by [\de.-]+$",
    ),
    ("first task", AddsNothing, {"fedavg_in_first_task": True}, r"^first task: .* differs by .*; it is in float64, up"),
    (
        "first task",
        DoesNothing,
        {"fedavg_in_first_task": False},
        r"^first task: DoesNothing .* in the first of 1 tasks",
    ),
    ("missing tasks", DividesBySamples, {}, r"DividesBySamples fails \(3 tasks, .*missing.*KeyError"),
    ("scenarios", CannotDoClasses, {}, r"^scenarios: CannotDoClasses declares class, but fails there: .*KeyError: 'cl"),
    ("scenarios", TakesDensities, {}, r"^scenarios: TakesDensities declares density, but fails there: "),
    ("declarations", FailsWhereAllTasksAreOne, {}, r"^declarations: .* not exclude exposure joint, but fails .*no end"),
    ("declarations", ReadsMomentum, {}, r"^declarations: .* not exclude model.optimizer Adam, but fails .*'momentum'"),
    ("options", TakesAnyStrength, {"wrong_options": (partial(TakesAnyStrength, -1.0),)}, r"^options: .* does not refu"),
    (
        "options",
        RefusesWithoutWords,
        {"wrong_options": (partial(RefusesWithoutWords, -1.0),)},
        r"^options: RefusesWithoutWords answers .* by no ConfigError but by ValueError: no$",
    ),
    ("options", NamesNoKey, {"wrong_options": (partial(NamesNoKey, -1.0),)}, r"without naming methods\., the value"),
    ("sums", ReadsSingleMessages, {}, r"^sums: .* reads topic 'bias' in round 0 when only 1 of 3 clients have sent"),
    ("sums", AsksClientsOneByOne, {}, r"^sums: .* reads topic 'one' in round 1 when only 1 of 3 clients have sent"),
    ("sums", SendsSingleMessages, {}, r"^sums: SendsSingleMessages does not declare .* the server single clients'"),
    ("shapes", ScalarPenalty, {}, r"penalty of shape \[\], not \[2\]: one number for every client"),
    ("shapes", LosesWeights, {}, r"methods\.tried\.transform_step gives no "),
    (
        "shapes",
        ChangesShape,
        {},
        r"^shapes: transform_step of ChangesShape gives conv\.weight as float32 \[1, 1, 3, 3\]",
    ),
    (
        "shapes",
        PullsTooMuch,
        {},
        r"^shapes: PullsTooMuch fails: .*methods\.tried\.pulls gives head\.weight an anchor of shape \[1, 5\]; ",
    ),
    ("task_free", KnowsTheTask, {}, r"^task_free: KnowsTheTask .* called three tasks instead of one: .* differs by \d"),
    ("state", ReportsPlainly, {}, r"^training: ReportsPlainly fails .* = 'ReportsPlainly\.report' .*gives dict, not"),
    ("reports", ReportsTensors, {}, r"^reports: figures of ReportsTensors hold more than plain values"),
    ("reports", ReportsAccuracies, {}, r"^reports: figures of ReportsAccuracies have names .* every run: \['acc'\]$"),
    ("reports", ChangesColumns, {}, r"^reports: rows of ChangesColumns have other columns"),
    ("storage", KeepsWithoutSaying, {}, r"^storage: clients keep \['rounds'\] for KeepsWithoutSaying, but its client_"),
]


@pytest.mark.parametrize(("name", "kind", "needs", "sentence"), WRONG, ids=[kind.__name__ for _, kind, _, _ in WRONG])
def test_a_wrong_method_is_caught(name: str, kind: type[Method], needs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_method(kind, skip=[other for other in PROPERTIES if other != name], **needs)


class HasOwnModels(Method):
    """Tests clients by models of their own, and leaves the global one as federated averaging does."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def extend_network(self, network: torch.nn.Module) -> None:
        network.register_parameter("own", torch.nn.Parameter(torch.zeros(1)))

    def keeps_local(self, name: str) -> bool:
        return name == "own"

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"head.bias": model["head.bias"] + self.by}


def test_models_that_clients_keep_to_themselves_are_an_effect() -> None:
    PROPERTIES["effect"](MethodCase(HasOwnModels))
    with pytest.raises(AssertionError, match=r"^effect: HasOwnModels ends where federated averaging ends, up to 0 in"):
        PROPERTIES["effect"](MethodCase(partial(HasOwnModels, 0.0)))


class PullsBack(Method):
    """Knows no task."""

    task_free = True

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        return {"head.weight": Pull(0.5, cohort.global_parameters["head.weight"][None])}


class UsesFeatures(Method):
    """Calls the network's features by themselves."""

    def local_loss(self, network: Any, x: Tensor, samples: Samples) -> Tensor:
        losses = cross_entropy(network.head(network.features(x)), samples.y, reduction="none")
        return (losses * samples.weights.to(losses.dtype)).sum()


def test_a_task_free_method_is_checked_beside_one_that_is_not() -> None:
    """The other method computes something else if the same rounds are several tasks."""
    check_method(
        PullsBack, beside=lambda: {"decays": Decays()}, skip=[name for name in PROPERTIES if name != "task_free"]
    )


def test_scenarios_in_which_a_method_beside_it_does_not_work_are_left_out() -> None:
    """FedProx works on densities and boxes, Decays does not."""
    PROPERTIES["scenarios"](MethodCase(partial(FedProx, mu=1.0), beside=lambda: {"decays": Decays()}))


@pytest.mark.parametrize("scenario", ["density", "regression"])
def test_a_method_of_one_scenario_is_checked_in_it(scenario: Scenario) -> None:
    settings: dict[Scenario, dict[str, Any]] = {
        "density": {"network": partial(MADE, hidden=[5]), "stream": black_and_white},
        "regression": {"network": mlp, "stream": brightness},
    }
    kind = type("OfOne", (Decays,), {"scenarios": frozenset({scenario})})
    skip = [name for name in PROPERTIES if name not in ("sums", "missing tasks")]
    check_method(kind, scenario=scenario, skip=skip, **settings[scenario])


@pytest.mark.parametrize(
    "data", [{"exposure": "asynchronous"}, {"schedule": {"clock_spread": 0.5}}], ids=["asynchronous", "clocks"]
)
def test_single_messages_show_where_clients_have_no_common_tasks(data: dict[str, Any]) -> None:
    skip = [name for name in PROPERTIES if name != "sums"]
    check_method(partial(FedProx, mu=1.0), data=data, skip=skip)
    anywhere = {"task_free": True, "client_clocks": True, "end_task": Method.end_task}
    reading = type("ReadsSingle", (ReadsSingleMessages,), anywhere)
    with pytest.raises(AssertionError, match=r"^sums: ReadsSingle .* when only 1 of 3 clients have sent"):
        check_method(reading, data=data, skip=skip)


def test_distances_are_those_of_all_tensors() -> None:
    nan, inf = float("nan"), float("inf")
    for found, expected, by in (
        ({"a": [1.0], "b": [nan]}, {"a": [1.0], "b": [0.0]}, inf),
        ({"a": [nan], "b": [1.0]}, {"a": [nan], "b": [3.0]}, 2.0),
        ({"a": [inf, 1.0]}, {"a": [inf, 1.5]}, 0.5),
        ({"a": [inf]}, {"a": [-inf]}, inf),
        ({"a": [True, False]}, {"a": [True, True]}, 1.0),
        ({"a": [], "b": [2.0]}, {"a": [], "b": [1.0]}, 1.0),
        ({"a": [], "c": [2.0]}, {"a": [], "b": [1.0]}, 0.0),
    ):
        assert distance(*({n: torch.tensor(v) for n, v in one.items()} for one in (found, expected))) == by
    most = torch.tensor([2**53], dtype=torch.int64)
    assert distance({"a": most.to(torch.uint8)}, {"a": torch.ones(1, dtype=torch.uint8)}) == 1.0


def test_features_of_networks_in_double_take_single_precision() -> None:
    case = MethodCase(UsesFeatures)
    assert case.run(in_double=True, engine="workers").models[-1]["head.weight"].dtype == torch.float64
    network = double(norm_net)((1, 4, 4), 4)
    copied = copy.deepcopy(network)
    with torch.no_grad():
        copied.conv.weight.zero_()  # type: ignore[union-attr, operator]
    x = torch.rand(3, 1, 4, 4)
    assert torch.equal(network.eval()(x), network.head(network.features(x)))
    assert not torch.equal(network(x), copied.eval()(x))


def test_every_property_can_fail() -> None:
    assert {name for name, *_ in WRONG} == set(PROPERTIES)


def test_what_is_taken_past_the_channel_shows_in_two_processes() -> None:
    check_method(HoardsUpdates, skip=[name for name in PROPERTIES if name != "reports"])
    with pytest.raises(AssertionError, match=r"^processes: HoardsUpdates computes something else in 2 processes"):
        check_method(HoardsUpdates, skip=list(PROPERTIES), processes=2)


def one_for_all() -> Callable[[], Method]:
    method = FedProx()
    return lambda: method


def test_what_makes_no_methods_is_refused() -> None:
    with pytest.raises(TypeError, match="make returns int"):
        check_method(int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="same object twice"):
        check_method(one_for_all())
    with pytest.raises(ValueError, match=r"skip = \['widths'\]: names among \['width'"):
        check_method(FedProx, skip=["widths"])
    with pytest.raises(TypeError, match="networks"):
        check_method(FedProx, networks=None)
    with pytest.raises(ValueError, match="need what pickles"):
        check_method(lambda: FedProx(1.0), skip=list(PROPERTIES), processes=2)


def test_what_cannot_be_sent_to_processes_is_found_before_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[Any]()
    monkeypatch.setitem(PROPERTIES, "width", called.append)
    with pytest.raises(ValueError, match=r"several processes need what pickles, .*lambda"):
        check_method(partial(FedProx, 1.0), beside=lambda: {"other": FedProx(1.0)}, processes=2)
    assert not called


def test_a_method_that_knows_no_boxes_is_checked_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks work without the library for boxes, except for a method that declares detection, which is refused."""

    def refuse(_: object) -> None:
        raise ConfigError("data.scenario", "detection", "an installation with pycocotools")

    monkeypatch.setattr(Detection, "require", refuse)
    skip = [name for name in PROPERTIES if name != "scenarios"]
    check_method(Decays, skip=skip)
    with pytest.raises(ConfigError, match="an installation with pycocotools"):
        check_method(KnowsBoxes, skip=skip)


class KnowsBoxes(Decays):
    """Declares detection as well."""

    scenarios = Decays.scenarios | {"detection"}
