"""Methods that declare ``task_free`` are shown no task ids and no boundaries, and do not depend on them."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.tiny import (
    NetworkFactory,
    double,
    fit,
    mlp,
    permuted,
    prompted_net,
    sgd,
    source,
    split,
    tiny_client,
    tiny_data,
    weights,
)
from test_registry import CASES
from test_registry import METHODS as REGISTERED
from torch import Tensor

import cfl.methods
from cfl.data.cohorts import CohortBatch
from cfl.data.exposure import Handles
from cfl.data.schedule import RoundPlan
from cfl.data.sequences import RandomTasks
from cfl.data.sources import Binarised
from cfl.data.streams import Permuted
from cfl.data.task_handles import TaskHandle, TaskHandles, TaskHidden, unwrap_task, unwrap_tasks
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.federation.replay_buffer import ReplayBuffer
from cfl.methods import (
    AGEM,
    DER,
    ER,
    EWC,
    FOT,
    GLFC,
    L2P,
    SCAFFOLD,
    DPFedAvg,
    FedAGEM,
    FedCurv,
    FedProx,
    FoundBoundaries,
    Method,
    PersonalLayers,
)
from cfl.methods.composition import Composition
from cfl.methods.context import Context
from cfl.methods.task_free import (
    TaskFreeCohort,
    TaskFreeContext,
    TaskFreePlan,
    task_free_cohort,
    task_free_plan,
)
from cfl.runtime.errors import ConfigError
from cfl.testing.tiny_data import black_and_white

FREE: dict[str, Callable[[], dict[str, Method]]] = {
    "agem": lambda: {"agem": AGEM(8)},
    "der": lambda: {"der": DER(0.5, 0.5, 8)},
    "fed_agem": lambda: {"fed_agem": FedAGEM(8)},
    "fed_agem-all": lambda: {"fed_agem": FedAGEM(8, clients="all")},
    "fed_agem-holders": lambda: {"fed_agem": FedAGEM(8, clients="holders")},
    "agem+fed_agem": lambda: {"agem": AGEM(8), "fed_agem": FedAGEM(8)},
    "fedprox": lambda: {"fedprox": FedProx(0.1)},
    "dp_fedavg": lambda: {"dp_fedavg": DPFedAvg(0.1, 0.5, quantile=0.5)},
    "fedcurv": lambda: {"fedcurv": FedCurv(0.5)},
    "scaffold-I": lambda: {"scaffold": SCAFFOLD("I")},
    "scaffold-II": lambda: {"scaffold": SCAFFOLD("II")},
    "personal": lambda: {"personal": PersonalLayers(["head.*"])},
    "glfc": lambda: {"glfc": GLFC(12, None, 0.0, perturbation_steps=2, inversion_steps=1, images=1)},
    "glfc+fed_agem": lambda: {**FREE["glfc"](), "fed_agem": FedAGEM(8)},
    "found-ewc": lambda: {
        "boundaries": FoundBoundaries(0.0, 0.1, warm_up=2, floor=0.001, keep_every=1),
        "ewc": EWC(5.0),
    },
    "found-fot": lambda: {
        "boundaries": FoundBoundaries(0.0, 0.1, warm_up=2, floor=0.001, keep_every=1),
        "fot": FOT(0.8, message="covariance", gpse_clients="all", freeze_first_layer=True),
    },
    "l2p": lambda: {"l2p": L2P(0.5, mask_logits=False)},
    "l2p-class": lambda: FREE["l2p"](),
    "l2p-class+fed_agem": lambda: {**FREE["l2p"](), "fed_agem": FedAGEM(8)},
}
_TRIED = {type(method) for make in FREE.values() for method in make().values()}
# Methods that need nothing else are tried as their entry of the registry says.
FREE |= {
    name: partial(CASES[name].methods, "tried")
    for name, kind in REGISTERED.items()
    if kind.task_free is True and kind not in _TRIED
}
CLASS_INCREMENTAL = [name for name in FREE if "glfc" in name or "class" in name]
OF_DENSITIES = [name for name in FREE if name in CASES and CASES[name].of_scenario() == "density"]


def test_all_free_methods_are_tried() -> None:
    """Tried are methods that are free by default, L2P without masks, and EWC and FOT beside FoundBoundaries."""
    kinds = [getattr(cfl.methods, name) for name in cfl.methods.__all__]
    methods = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Method) and kind is not Method]
    assert len(methods) > 20
    tried = {type(method) for make in FREE.values() for method in make().values()}
    made = [kind if _needs_options(kind) else kind() for kind in methods]
    assert tried - {EWC, FOT} == {L2P} | {kind for kind, method in zip(methods, made, strict=True) if method.task_free}


def _needs_options(kind: type[Method]) -> bool:
    options = inspect.signature(kind).parameters.values()
    return any(option.default is inspect.Parameter.empty and option.kind != option.VAR_KEYWORD for option in options)


THEIR_OWN = ("task_free.py", "context.py")
METHODS = [path for path in Path(cfl.methods.__file__).parent.rglob("*.py") if path.name not in THEIR_OWN]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_no_method_unwraps_a_task(path: Path) -> None:
    assert not re.search(r"\b(unwrap_task|unwrap_tasks|TaskHandles?)\(|(?<!self)\._(behind|tasks?)\b", path.read_text())


@pytest.mark.parametrize(
    "use",
    [
        lambda task: task == 0,
        lambda task: task != task,
        lambda task: task > 0,
        lambda task: {task: 1},
        int,
        bool,
        operator.index,
        lambda task: [1, 2][task],
        lambda task: range(task),
    ],
)
def test_a_task_handle_can_only_be_passed_on(use: Callable[[Any], Any]) -> None:
    for task in (0, 2):
        with pytest.raises(TaskHidden, match="hidden from a method"):
            use(TaskHandle(task))
        assert unwrap_task(TaskHandle(task)) == unwrap_task(task) == task
    assert repr(TaskHandle(0)) == repr(TaskHandle(1))
    with pytest.raises(IndexError):
        torch.zeros(3)[TaskHandle(1)]  # type: ignore[index]
    with pytest.raises(TypeError):
        TaskHandle(1) + 1  # type: ignore[operator]


def test_a_task_free_round_does_not_say_whether_it_is_a_tasks_first_or_last() -> None:
    plan = task_free_plan(RoundPlan(3, 1, 0, (2, 5), True))
    assert (plan.round, plan.clients) == (3, (2, 5))
    assert isinstance(plan.task, TaskHandle)
    for name in ("round_in_task", "last_of_task"):
        with pytest.raises(TaskHidden, match=name):
            getattr(plan, name)


class Looks(Method):
    """Looks for a task in one of its hooks."""

    def __init__(self, hook: str, look: Callable[..., Any], free: bool) -> None:
        self.task_free, self.seen = free, 0

        def called(*given: Any) -> Any:
            look(*given)
            self.seen += 1
            return given[1] if hook == "extend_batch" else given[0] if hook == "sample_weights" else None

        setattr(self, hook, called)


@pytest.mark.parametrize(
    "use",
    [
        lambda tasks: tasks.max(),
        lambda tasks: tasks == 0,
        lambda tasks: tasks[0],
        len,
        list,
        torch.as_tensor,
    ],
)
def test_task_handles_of_samples_can_only_be_passed_on(use: Callable[[Any], Any]) -> None:
    tasks = torch.tensor([[0, 2]])
    with pytest.raises((TaskHidden, TypeError, RuntimeError)):
        use(TaskHandles(tasks))
    assert torch.equal(unwrap_tasks(TaskHandles(tasks)), unwrap_tasks(tasks))


@pytest.mark.parametrize(
    ("view", "read"),
    [
        (TaskHandle(1), unwrap_task),
        (TaskHandles(torch.tensor([1])), lambda tasks: unwrap_tasks(tasks).tolist()),
        (
            task_free_plan(RoundPlan(3, 1, 0, (2, 5), True)),
            lambda plan: (plan.round, plan.clients, unwrap_task(plan.task)),
        ),
        (task_free_cohort(Cohort(torch.nn.Linear(2, 2), 2)), lambda cohort: list(cohort.parameters)),
    ],
)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_views_can_be_copied(view: Any, read: Callable[[Any], Any], copied: Callable[[Any], Any]) -> None:
    found = copied(view)
    assert type(found) is type(view)
    assert read(found) == read(view)
    assert not hasattr(found, "__wrapped__")


# Each look with the value that a method with tasks sees.
SEEN: list[tuple[Callable[[Context], Any], Any]] = [
    (lambda context: context.num_tasks, 2),
    (lambda context: context.accuracy.num_tasks, 2),
    (lambda context: context.client_clocks, False),
    (lambda context: len(context.outputs.own), 2),
    (lambda context: context.is_last(1), True),
    (lambda context: context.task_of(0), 0),
    (lambda context: context.began(1, 0), 1),
    (lambda context: context.plan(0).last_of_task, True),
    (lambda context: context.plan(1).task + 1, 2),
    (lambda context: context.task_at(1, 0) + 1, 2),
    (lambda context: context.due(RoundPlan(0, 0, 0, (0,), True)), [0, 1, 2, 3]),
    (lambda context: context.members(1), [0, 1, 2, 3]),
    (lambda context: context.own_clients(1, [0]), [0]),
    (lambda context: context.extra_round(1, [0]), [0]),
    (lambda context: len(context.indices(1, 0)), 20),
    (lambda context: len(context.global_index_of(1, 0)), 20),
    (lambda context: context.global_index_trained_on(1, 0).min() >= 80, True),
    (lambda context: len(context.gather(1, torch.tensor([0]))[1]), 1),
    (lambda context: len(context.samples_of(torch.tensor([1]), torch.tensor([0]), None)[1]), 1),
    (lambda context: [len(y) for _, y in context.client_batches(1, 0, 99, torch.device("cpu"))], [20]),
    (lambda context: len(list(context.validation_batches(1, 0, 99, torch.device("cpu")))), 1),
    (lambda context: context.num_validating(1, 0), 0),
    (lambda context: context.transform_of(1) is context.transform_of(1), True),
    (lambda context: context.outputs_in_loss(1, 0), None),
    (lambda context: context.outputs_in_loss_of(torch.tensor([0]), 1), None),
]


class Sees(Method):
    """Asks for a buffer, and does nothing."""

    replays_logits: ClassVar[bool] = False


@pytest.mark.parametrize(("look", "seen"), SEEN)
def test_a_free_methods_context_does_not_tell_the_task(look: Callable[[Context], Any], seen: Any) -> None:
    free, bound = Sees(), Sees()
    free.task_free = True
    for method in (free, bound):
        data = tiny_data(permuted(2), schedule={"rounds_per_task": 1})
        federation = fit(tiny_client(data, methods={"sees": method}), data)
        assert method.context.num_rounds == method.context.round == federation.round == 2
    with pytest.raises((TaskHidden, TypeError), match=r"hidden|TaskHandle"):
        look(free.context)
    assert look(bound.context) == seen


def test_what_is_shown_of_a_run_is_this_and_no_more() -> None:
    """A name that is added must be listed here, after checking that it does not reveal the task."""
    shown = {
        TaskFreePlan: "clients round",
        TaskFreeCohort: "buffers clients global_parameters gradients gradients_on lr network own parameters round rows "
        "sizes steps use_outputs used_outputs used_rows",
        TaskFreeContext: "at_server batch_size batchnorm buffer channel class_loss client_weighting clients device "
        "eval_batch_size evaluation_statistics everyones exposure finished frozen has_personal_models input_shape "
        "local_epochs measure methods most_trained_on network num_clients num_outputs num_rounds optimizer personal "
        "personal_state round scenario seed shared_buffers shared_parameters shared_tensors "
        "state_tensors",
    }
    assert {kind: " ".join(sorted(kind._SHOWN)) for kind in shown} == shown
    by_task = "client_batches members outputs_in_loss outputs_in_loss_of own_clients"
    assert " ".join(sorted(TaskFreeContext._TASK_AT)) == by_task
    own = "expected_clients global_index_trained_on labels_at plan present samples_at task_at"
    assert " ".join(sorted(name for name in vars(TaskFreeContext) if not name.startswith("_"))) == own


def test_a_task_is_where_it_is_said_to_be() -> None:
    """``_TASK_AT`` has the position of each function's argument ``task``."""
    for name, at in TaskFreeContext._TASK_AT.items():
        assert list(inspect.signature(getattr(Context, name)).parameters)[at + 1] == "task"


def test_no_method_is_told_whose_samples_are_at_a_place() -> None:
    data = tiny_data(permuted(2))
    with pytest.raises(TaskHidden, match="tasks of samples"):
        data.samples_at(torch.tensor([0]))[2].sum()


def test_a_free_method_cannot_write_to_what_it_would_not_reach() -> None:
    method, data = Sees(), tiny_data(permuted(2), schedule={"rounds_per_task": 1})
    method.task_free = True
    federation = fit(tiny_client(data, methods={"sees": method}), data)
    with pytest.raises(TaskHidden, match="setting round of the context"):
        method.context.round = 1  # type: ignore[misc]
    with pytest.raises(TaskHidden, match="setting outputs of the context"):
        method.context.outputs = None  # type: ignore[assignment,misc]
    assert federation.round == 2
    assert copy.copy(method.context).round == 2


EXPOSURES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "cumulative": {"exposure": "cumulative"},
    "asynchronous": {"exposure": "asynchronous"},
    "sequences": {"sequences": RandomTasks(2)},
}


@pytest.mark.parametrize("exposure", list(EXPOSURES))
def test_a_steps_samples_go_by_their_handles(exposure: str) -> None:
    """A batch's indices are the handles that the data module has for its samples."""
    seen: dict[tuple[int, int], set[int]] = {}

    class Looks(Method):
        task_free = True

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            assert batch.gather is not None
            assert batch.handles is None
            assert not [name for name in dir(batch.gather) if not name.startswith("_")]
            for x, y in (batch.gather(batch.index), self.context.samples_at(batch.index)[:2]):
                assert torch.equal(x, batch.x)
                assert torch.equal(y, batch.y)
            for row, client in enumerate(batch.clients):
                seen.setdefault((cohort.round, client), set()).update(batch.index[row].tolist())
                held = self.context.global_index_trained_on(cohort.task, client)
                assert set(batch.index[row].tolist()) <= set(held.tolist())
            return batch

    data = tiny_data(split(3, classes=6), **EXPOSURES[exposure])
    fit(tiny_client(data, methods={"looks": Looks()}), data)
    for number in range(data.num_rounds):
        for client in range(4):
            places = data.global_index_trained_on(data.rounds.round(number).task, client)
            assert seen[number, client] == set(data.handles.of(places).tolist())


@pytest.mark.parametrize("exposure", [name for name in EXPOSURES if name != "asynchronous"])
def test_what_a_free_method_makes_of_a_steps_samples_holds(exposure: str) -> None:
    """A free method that reorders samples and changes images has the results of a method that is told tasks."""

    class Turns(Method):
        replays_logits = False

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            fetch = batch.gather
            assert fetch is not None
            turned = batch.index if batch.padded else batch.index.flip(1)
            return replace(batch, index=turned, gather=lambda index: (fetch(index)[0].flip(-1), fetch(index)[1]))

    class Behind(Method):
        """Records the tasks and places that it sees."""

        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            self.seen.append([cohort.task, *batch.index.flatten().tolist(), *batch.task_ids.flatten().tolist()])
            return batch

    runs, seen = [], []
    for free in (True, False):
        turns, behind, data = Turns(), Behind(), tiny_data(split(3, classes=6), **EXPOSURES[exposure])
        turns.task_free = free
        client = tiny_client(data, double(mlp), sgd, {"turns": turns, "behind": behind})
        client.buffer = ReplayBuffer(12)
        runs.append(fit(client, data))
        seen.append(behind.seen)
    assert seen[0] == seen[1]
    assert all(torch.equal(weights(runs[1])[name], value) for name, value in weights(runs[0]).items())
    for client in range(4):
        tables = [run.clients.get("buffer", client) for run in runs]
        assert tables[0] is not None
        assert tables[1] is not None
        assert torch.equal(tables[0]["place"], tables[1]["place"])


def test_a_step_without_handles_is_not_shown() -> None:
    data = tiny_data(permuted(2))
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with pytest.raises(RuntimeError, match="has not passed through the data module"):
        batch.without_tasks()
    assert isinstance(data.with_samples(batch, None).without_tasks().task, TaskHandle)


@pytest.mark.parametrize("free", [True, False])
def test_tasks_of_samples_that_others_replay_are_hidden_too(free: bool) -> None:
    class Looks(Method):
        replays_logits = False
        task_free = free

        def __init__(self) -> None:
            self.hidden, self.shown = 0, set[int]()

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            assert self.context.buffer is not None
            drawn = self.context.buffer.draw(cohort, batch, 4, "looks")
            if drawn is not None:
                with pytest.raises(TaskHidden, match="tasks of samples"):
                    drawn.as_step_of(batch).task_ids.max()
            for part in batch.added:
                if isinstance(part.tasks, TaskHandles):
                    self.hidden += 1
                else:
                    self.shown |= set(part.tasks.flatten().tolist())
            return batch

    data, looks = tiny_data(permuted(2), schedule={"rounds_per_task": 2}), Looks()
    fit(tiny_client(data, methods={"er": ER(8), "looks": looks}), data)
    assert (looks.hidden > 0) == free
    assert looks.shown == (set() if free else {0})


def _cohort(cohort: Cohort, *_: Any) -> None:
    assert cohort.task >= 0


LOOKS: list[tuple[str, Callable[..., Any]]] = [
    ("start_clients", _cohort),
    ("penalty", _cohort),
    ("adjust_gradients", _cohort),
    ("finish_clients", _cohort),
    ("start_clients", lambda cohort: cohort.train_outputs),
    ("start_clients", lambda cohort: cohort.outputs_in_loss(cohort.task)),
    ("extend_batch", lambda cohort, batch: batch.task_ids.sum().item()),
    ("extend_batch", lambda cohort, batch: batch.task + 1),
    ("end_round", lambda plan: plan.last_of_task),
    ("end_round", lambda plan: plan.task == 0),
]


@pytest.mark.parametrize(("hook", "look"), LOOKS)
@pytest.mark.parametrize("exposure", ["sequential", "asynchronous"])
def test_nothing_that_a_free_method_is_handed_tells_the_task(hook: str, look: Any, exposure: Any) -> None:
    def run(free: bool) -> Looks:
        data = tiny_data(split(2), exposure=exposure)
        # On the class, so that the engine knows that the hook is there.
        kind = type("LooksIn", (Looks,), {hook: lambda self, *given: self.__dict__[hook](*given)})
        method = kind(hook, look, free)
        fit(tiny_client(data, methods={"looks": method}), data)
        return method

    with pytest.raises((RuntimeError, TypeError), match=r"hidden|unsupported operand|TaskHandle"):
        run(free=True)
    if exposure == "sequential":
        assert run(free=False).seen > 0


def test_tasks_are_hidden_from_the_free_method_alone() -> None:
    class Free(Method):
        def __init__(self) -> None:
            self.task_free = True  # on the instance, as by an option; such a class would be refused

        def begin_task(self, plan: RoundPlan) -> None:
            raise AssertionError("told of a boundary")

        end_task = begin_task

    class Bound(Method):
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        def begin_task(self, plan: RoundPlan) -> None:
            self.heard.append(("begin", plan.task))

        def end_task(self, plan: RoundPlan) -> None:
            self.heard.append(("end", plan.task))

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            assert batch.task == cohort.task
            assert bool((batch.task_ids == cohort.task).all())
            return batch

    bound = Bound()
    data = tiny_data(permuted(2))
    fit(tiny_client(data, methods={"before": Free(), "bound": bound, "after": Free()}), data)
    assert bound.heard == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]


@pytest.mark.parametrize("method", [ER(per_task=False, update="step"), EWC()])
def test_other_methods_are_refused_where_clients_have_their_own_clocks(method: Method) -> None:
    data = tiny_data(exposure="asynchronous")
    with pytest.raises(ConfigError, match=r"data\.exposure"):
        fit(tiny_client(data, methods={"some": method}), data)


@pytest.mark.parametrize(
    ("method", "free"),
    [
        (ER(per_task=False, update="step"), FedProx(mu=0.1)),
        (L2P(), L2P(mask_logits=False)),
    ],
)
def test_who_needs_to_know_where_tasks_end_is_refused_where_nobody_does(method: Method, free: Method) -> None:
    data = tiny_data(exposure="asynchronous")
    with pytest.raises(ConfigError, match=r"needs to know where tasks end$"):
        Composition({"some": method}).check(data)
    Composition({"some": free}).check(data)


class Repeated(Permuted):
    """The same task over and over."""

    def pixel_map(self, task: int, seed: int) -> None:
        return None


class Shifted(Handles):
    """The handles of samples whose places have been moved up by ``by``."""

    def __init__(self, handles: Handles, by: int) -> None:
        self._handles, self._by = handles, by

    def of(self, global_index: Any) -> Any:
        return self._handles.of(global_index - self._by)

    def global_index(self, handles: Tensor) -> Tensor:
        return self._handles.global_index(handles) + self._by

    def offset_by(self, start: int) -> Handles:
        return self._handles.offset_by(start - self._by)


def _free_run(name: str, methods: dict[str, Method], scramble: bool, **options: Any) -> Federation:
    """Run three tasks. With ``scramble`` the same samples have wrong task ids and other places."""
    if name in CLASS_INCREMENTAL:
        data = tiny_data(split(3, classes=6), scenario="class", **options)
    elif name in OF_DENSITIES:
        data = tiny_data(black_and_white(3), scenario="density", **options)
    else:
        data = tiny_data(permuted(3), **options)
    if scramble:
        places, samples_at, handles = data.global_index, data.samples_at, data.handles
        tasks = places.tasks
        size = len(data.tasks[0].train)
        places.starts = places.starts + size  # in the same order, at the next task's places
        data.handles = Shifted(handles, size)  # every sample keeps its handle

        def scrambled_at(*given: Any, **options: Any) -> tuple[Tensor, Tensor, TaskHandles]:
            x, y, of = samples_at(*given, **options)
            return x, y, TaskHandles((unwrap_tasks(of) + 1) % 3)

        # Images are still fetched by the right task.
        places.split = lambda at: (tasks(at), at - torch.from_numpy(places.starts)[tasks(at)])  # type: ignore[method-assign]
        places.tasks = lambda at: (tasks(at) + 1) % 3  # type: ignore[method-assign]
        data.samples_at = scrambled_at  # type: ignore[method-assign]
    return fit(tiny_client(data, _network(name), sgd, methods), data)


def _network(name: str) -> NetworkFactory:
    if name in OF_DENSITIES:
        return double(CASES[name].network)
    return double(prompted_net if "l2p" in name else mlp)


class Cheats(Method):
    """Unwraps hidden tasks: those of the samples that it draws from the buffer."""

    task_free, replays_logits = True, False
    factor = 1

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        assert self.context.buffer is not None
        drawn = self.context.buffer.draw(cohort, batch, 4, "cheat")
        self.factor = 1 if drawn is None else 1 + int(unwrap_tasks(drawn.tasks).max())
        return batch

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values():
            gradient.mul_(self.factor)


class CheatsByPlaces(Cheats):
    """Unwraps the handles of samples to places, which are ordered by task."""

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        places = self.context._handles.global_index(batch.index)  # type: ignore[attr-defined]
        self.factor = 1 + int(places[0, 0]) // 80 % 3
        return batch


CHEATS = {"a cheat": Cheats, "a cheat by places": CheatsByPlaces}


# FedCurv looks back to a task's data, and SCAFFOLD-I to a round's, which do not run with exposure: asynchronous.
SCRAMBLED = [(name, "sequential") for name in [*FREE, *CHEATS]]
SCRAMBLED += [("found-ewc", "unannounced"), ("found-fot", "unannounced")]
SCRAMBLED += [(name, "asynchronous") for name in [*FREE, *CHEATS] if name not in ("scaffold-I", "fedcurv")]


@pytest.mark.parametrize(("name", "exposure"), SCRAMBLED)
def test_scrambled_task_ids_and_places_change_nothing(name: str, exposure: str) -> None:
    make = FREE.get(name, lambda: {"cheat": CHEATS[name]()})
    runs = [_free_run(name, make(), scramble, exposure=exposure) for scramble in (False, True)]
    same = [torch.equal(weights(runs[1])[key], value) for key, value in weights(runs[0]).items()]
    assert any(same) != (name in CHEATS)
    assert all(same) or name in CHEATS
    assert all(same) == torch.equal(runs[0].measured.compute(), runs[1].measured.compute())
    if name == "glfc":  # the memories must not be empty
        kept = [runs[0].clients.get("glfc", client) for client in range(4)]
        assert all(table is not None and (table["place"] >= 0).any() for table in kept)


# If tasks add classes, the data themselves show boundaries. GLFC's clients also look at which samples they have, which
# here differ between copies of one data set.
@pytest.mark.parametrize("name", [n for n in FREE if n not in CLASS_INCREMENTAL])
def test_boundaries_put_elsewhere_change_nothing(name: str) -> None:
    """The same rounds of one data set give the same model as one task and as three tasks."""
    models = []
    for rounds in ([6], [2, 3, 1]):
        images, scenario = (Binarised(source()), "density") if name in OF_DENSITIES else (source(), None)
        schedule = {"rounds_per_task": rounds}
        data = tiny_data(Repeated(images, len(rounds)), scenario=scenario, repartition=False, schedule=schedule)
        client = tiny_client(data, _network(name), sgd, FREE[name]())
        client.buffer = ReplayBuffer(20, offered="every_step")  # "once" tells the tasks' samples apart
        models.append(weights(fit(client, data)))
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=1e-12)
