"""Several methods in one run: their capabilities, what is left to the engine, and mistakes that are refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.tiny import fit, mlp, permuted, sgd, tiny_client, tiny_data, weights
from torch import Tensor

from cfl import methods as built_in
from cfl.data.cohorts import CohortBatch
from cfl.data.schedule import RoundPlan
from cfl.engines import EngineOptions
from cfl.engines.base import Engine
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.engines.right_factors import RightFactor
from cfl.methods import AGEM, FOT, FedAGEM, FedProx, Method
from cfl.methods import capabilities as all_capabilities
from cfl.methods.base import Report
from cfl.methods.capabilities import adds_to_gradients, has
from cfl.methods.combinations import check_optimizer
from cfl.methods.composition import Composition
from cfl.methods.context import Context
from cfl.methods.returned_values import check_report
from cfl.models.evaluation import evaluation_mode
from cfl.runtime.errors import ConfigError
from cfl.testing.tiny_networks import norm_net

CAPABILITIES = {
    name: kind
    for name, kind in vars(all_capabilities).items()
    if inspect.isclass(kind) and getattr(kind, "_is_protocol", False) and kind.__module__ == all_capabilities.__name__
}
METHODS = {name: getattr(built_in, name) for name in built_in.__all__ if name != "Method"}


class Pulls(Method):
    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        if self.strength == 0:
            return {}
        return {name: Pull(self.strength, received[None]) for name, received in cohort.global_parameters.items()}


class Multiplies(Method):
    def right_factors(self, cohort: Cohort) -> dict[str, RightFactor]:
        weight = cohort.parameters["head.weight"]
        basis = torch.eye(weight.shape[2])[:, :1].expand(len(weight), -1, -1)
        return {"head.weight": RightFactor(basis, removes=True)}


class Adds(Method):
    changes_gradients = True

    def adjust_gradients(self, cohort: Cohort) -> None:
        for gradient in cohort.gradients.values():
            gradient.add_(1.0)


class Term(Method):
    def penalty(self, cohort: Cohort) -> Tensor:
        return torch.zeros(len(cohort.clients))


def started(**methods: Method) -> Composition:
    """A composition of methods whose clients have just started a round."""
    composition = Composition(methods)
    cohort = Cohort(mlp((1, 4, 4), 4), 2)
    shared = {name: parameter.detach() for name, parameter in cohort.network.named_parameters()}
    cohort.open([0, 1], [3, 3], 0, 0, shared, {})
    composition.attend(cohort)
    composition.start_clients()
    return composition


def test_there_are_capabilities() -> None:
    assert len(CAPABILITIES) > 10


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_capabilities_whose_members_it_has(name: str) -> None:
    """``has`` finds every Protocol's members by name in the class and its bases. A member that is None is missing."""
    for kind in CAPABILITIES.values():
        members = [m for m in [*vars(kind), *vars(kind).get("__annotations__", {})] if not m.startswith("_")]
        assert members
        holders = [[vars(base) for base in METHODS[name].__mro__ if member in vars(base)] for member in members]
        expected = all(bool(h) and h[0][member] is not None for h, member in zip(holders, members, strict=True))
        assert has(METHODS[name], kind) is expected, kind


def test_the_base_has_none() -> None:
    for kind in CAPABILITIES.values():
        assert not has(Method, kind)
    assert started(a=Method()).changing_gradients() == []
    assert not Method().computes_locally


def engine(multiplies: bool, pulls: bool) -> Engine:
    return cast(Engine, SimpleNamespace(multiplies=multiplies, pulls=pulls))


@pytest.mark.parametrize(
    ("methods", "left"),
    [
        ({}, "nothing"),
        ({"a": Pulls()}, "pulls"),
        ({"a": Method(), "b": Pulls()}, "pulls"),
        ({"a": Pulls(0.0), "b": Pulls()}, "pulls"),
        ({"a": Pulls(), "b": Pulls()}, "nothing"),
        ({"a": Multiplies()}, "factors"),
        ({"a": Pulls(0.0), "b": Multiplies()}, "factors"),
        ({"a": Pulls(), "b": Multiplies()}, "nothing"),
        ({"a": Adds(), "b": Multiplies()}, "nothing"),
        ({"a": Pulls(), "b": Adds()}, "nothing"),
        ({"a": Pulls(), "b": Term()}, "nothing"),
    ],
)
def test_an_engine_is_left_what_one_method_alone_wants(methods: dict[str, Method], left: str) -> None:
    composition = started(**methods)
    pulls, factors = composition.left_to_engine(engine(multiplies=True, pulls=True))
    assert ("pulls" if pulls else "factors" if factors else "nothing") == left
    assert not (pulls and factors)
    assert composition.left_to_engine(engine(multiplies=False, pulls=False)) == ({}, {})
    assert composition.left_to_engine(None) == ({}, {})


@pytest.mark.parametrize("taken", [True, False])
def test_gradients_are_multiplied_once(taken: bool) -> None:
    composition = started(a=Multiplies())
    composition.left_to_engine(engine(multiplies=taken, pulls=True))
    cohort = composition.shown(composition["a"])
    for parameter in cohort.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    composition.adjust_gradients()
    found = cohort.gradients["head.weight"]
    assert bool((found[..., 0] == (1.0 if taken else 0.0)).all())
    assert bool((found[..., 1:] == 1.0).all())


def test_a_pull_of_no_parameter_is_refused() -> None:
    class Misspelt(Method):
        def pulls(self, cohort: Cohort) -> dict[str, Pull]:
            return {"wieght": Pull(1.0, torch.zeros(1))}

    data = tiny_data()
    with pytest.raises(RuntimeError, match=r"methods\.m\.pulls names wieght, no parameter of the network"):
        fit(tiny_client(data, methods={"m": Misspelt()}), data)


@pytest.mark.parametrize("strength", [1, np.float32(0.1), np.int64(1), torch.tensor(0.1)])
def test_a_strength_is_any_number(strength: Any) -> None:
    class Fitting(Method):
        def pulls(self, cohort: Cohort) -> dict[str, Pull]:
            return {"head.weight": Pull(strength, cohort.global_parameters["head.weight"][None])}

    data = tiny_data()
    assert fit(tiny_client(data, methods={"m": Fitting()}), data).finished


def test_a_model_keeps_what_a_method_leaves_out() -> None:
    class Partial(Method):
        def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
            return without_biases(model)

    data = tiny_data()
    federation = fit(tiny_client(data, methods={"m": Partial()}), data)
    tensors = federation.model.state_tensors()
    found = federation.model_for(0, tensors)
    assert {name: found[name] is tensor for name, tensor in tensors.items()} == dict.fromkeys(tensors, True)


@pytest.mark.parametrize(
    ("pull", "said"),
    [
        (lambda received: Pull(1.0, received), r"an anchor of shape \[4, 8\]"),
        (lambda received: Pull(torch.ones(4, 8), received[None]), r"a strength of shape \[4, 8\]"),
        (lambda received: Pull(1.0, received.new_zeros(())), r"an anchor of shape \[\]"),
    ],
)
@pytest.mark.parametrize("engine", ["vmap", "workers"])
def test_a_pull_that_does_not_fit_the_weights_is_refused(engine: Any, pull: Any, said: str) -> None:
    """A pull without the clients' axis is refused, because engines would broadcast it in different ways."""

    class Unfitting(Method):
        def pulls(self, cohort: Cohort) -> dict[str, Pull]:
            return {"head.weight": pull(cohort.global_parameters["head.weight"])}

    data = tiny_data()
    with pytest.raises(RuntimeError, match=rf"methods\.m\.pulls gives head\.weight {said}; .* may be 1"):
        fit(tiny_client(data, methods={"m": Unfitting()}, engine=EngineOptions(engine)), data)


@pytest.mark.parametrize(
    ("pull", "said"),
    [
        (lambda received: Pull(1.0, received.double()), "an anchor of torch.float64, not a tensor of torch.float32"),
        (lambda received: Pull(1.0, 0.0), "an anchor of float, not a tensor of torch.float32"),  # type: ignore[arg-type]
        (lambda received: Pull(-1.0, received), "the strength -1.0, not a number of at least 0"),
        (lambda received: Pull(math.nan, received), "the strength nan, not a number of at least 0"),
        (lambda received: Pull(None, received), "the strength None, not a number of at least 0"),  # type: ignore[arg-type]
    ],
)
def test_a_pull_of_another_type_is_refused(pull: Any, said: str) -> None:
    """One engine would compute with it, another would fail."""

    class Unfitting(Method):
        def pulls(self, cohort: Cohort) -> dict[str, Pull]:
            return {"head.weight": pull(cohort.global_parameters["head.weight"][None])}

    data = tiny_data()
    with pytest.raises(RuntimeError, match=rf"methods\.m\.pulls gives head\.weight {said}"):
        fit(tiny_client(data, methods={"m": Unfitting()}), data)


def test_nothing_is_left_of_a_rounds_pulls() -> None:
    composition = started(a=Pulls(), b=Multiplies())
    assert len(composition.changing_gradients()) == 2
    composition.end_round(tiny_data().rounds.round(0))
    assert composition.changing_gradients() == []


@pytest.mark.parametrize("method", [AGEM(), FedAGEM(), Multiplies()])
def test_clipping_by_value_would_turn_what_is_projected(method: Method) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    check_optimizer({"a": method}, optimizer, "norm")
    check_optimizer({"a": method}, optimizer, None)
    with pytest.raises(ConfigError, match=r"trainer\.gradient_clip_algorithm = 'value' .*norm while methods\.a says"):
        check_optimizer({"a": method}, optimizer, "value")
    check_optimizer({"a": Adds()}, optimizer, "value")


class Transforms(Method):
    def __init__(self, change: Any) -> None:
        self.change = change

    def transform_step(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.change(step)
        return found


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda step: {}, TypeError, "no w: it must return all 1 tensors"),
        (lambda step: {**step, "more": step["w"]}, TypeError, "more, which it was not given"),
        (lambda step: list(step), TypeError, "list, not a dict of tensors by name"),
        (lambda step: {"w": 0.5}, TypeError, "w as float, not as a tensor"),
        (lambda step: {"w": step["w"].long()}, TypeError, "w as torch.int64, not as torch.float32"),
        (lambda step: {"w": step["w"][:1]}, ValueError, r"w of shape \[1, 3\], not \[2, 3\]"),
    ],
)
def test_a_step_is_of_every_parameter_and_of_its_shape(change: Any, error: type[Exception], said: str) -> None:
    composition = Composition({"a": Transforms(change), "b": Transforms(lambda step: {"w": 2 * step["w"]})})
    step = {"w": torch.ones(2, 3)}
    with pytest.raises(error, match=rf"methods\.transforms\.transform_step gives {said}"):
        composition.transform_step("a", step)
    assert torch.equal(composition.transform_step("b", step)["w"], torch.full((2, 3), 2.0))


def test_who_only_looks_or_multiplies_adds_nothing_to_gradients() -> None:
    looking: Any = type("Looking", (Adds,), {"kind": "look"})()
    assert adds_to_gradients(Adds())
    assert adds_to_gradients(Pulls())
    assert not adds_to_gradients(Multiplies())
    assert not adds_to_gradients(looking)
    pulling: Any = type("Pulling", (Adds, Pulls), {"kind": "look"})()
    assert adds_to_gradients(pulling), "it looks, but its pulls change gradients"
    assert not adds_to_gradients(Term())


def test_a_capability_may_be_switched_off() -> None:
    """A strength of 0 is federated averaging, to the bit."""
    found = []
    for methods in ({}, {"a": Pulls(0.0)}, {"a": Pulls(0.5)}):
        data = tiny_data(permuted(1))
        federation = fit(tiny_client(data, mlp, sgd, methods), data)
        found.append(federation.network.head.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize(
    ("written", "meant"),
    [("end_rounds", "end_round"), ("start_client", "start_clients"), ("adjust_gradient", "adjust_gradients")],
)
def test_a_misspelt_name_is_refused(written: str, meant: str) -> None:
    """Refused in the class, in a base class and as a property. Names with a leading underscore are free."""
    base: Any = type("Base", (Method,), {written: lambda self, *arguments: None})
    for kind in (base, type("Extended", (base,), {}), type("Base", (Method,), {written: property(lambda self: True)})):
        with pytest.raises(ConfigError, match=rf"methods\.mine = 'Base\.{written}' .*valid: {meant}, or a name with"):
            Composition({"mine": kind()}).check(tiny_data())
    switch: Any = type("Switch", (Method,), {"replaces_own_los": True})
    with pytest.raises(ConfigError, match=r"Switch\.replaces_own_los.*valid: replaces_own_loss"):
        Composition({"mine": switch()}).check(tiny_data())
    free: Any = type("Free", (Method,), {f"_{written}": lambda self: None, "penalty_of": lambda self: None})
    Composition({"mine": free()}).check(tiny_data())


class Short(Method):
    def end_round(self) -> None:  # type: ignore[override]
        """Takes no plan."""


class Long(Method):
    def transform_step(self, step: dict[str, Tensor], share: float) -> dict[str, Tensor]:
        return step


class MoreByDefault(Method):
    def transform_step(self, step: dict[str, Tensor], share: float = 0.5, *others: Any) -> dict[str, Tensor]:
        return step


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Short(), r"methods\.mine = 'Short\.end_round\(self\)' cannot work; valid: end_round\(self, plan\)"),
        (Long(), r"methods\.mine = 'Long\.transform_step\(self, step, share\)' .* transform_step\(self, step\)"),
    ],
)
def test_parameters_other_than_the_declared_ones_are_refused(method: Method, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Composition({"mine": method}).check(tiny_data())
    Composition({"mine": MoreByDefault()}).check(tiny_data())


def test_an_option_that_setup_would_overwrite_is_refused() -> None:
    class Lost(Method):
        def __init__(self, source: str) -> None:
            self.source = source  # type: ignore[assignment]

    class Kept(Method):
        def __init__(self, source: str) -> None:
            self.data = source

    with pytest.raises(
        ConfigError, match=r"methods\.mine\.source = 'coco' .*Lost, whose self\.source setup overwrites"
    ):
        Composition({"mine": Lost("coco")}).check(tiny_data())
    Composition({"mine": Kept("coco")}).check(tiny_data())


def test_scores_of_another_shape_are_refused() -> None:
    class Narrow(Method):
        def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.zeros(len(x), 1)

    data = tiny_data()
    with pytest.raises(RuntimeError, match=r"methods\.mine\.classify gives scores of shape \[\d+, 1\], not \[\d+, 4\]"):
        fit(tiny_client(data, methods={"mine": Narrow()}), data)


def test_a_returned_gradient_is_refused() -> None:
    class Returns(Method):
        def adjust_gradients(self, cohort: Cohort) -> Any:
            return {name: 0 * gradient for name, gradient in cohort.gradients.items()}

    data = tiny_data()
    with pytest.raises(RuntimeError, match=r"methods\.mine\.adjust_gradients returns a value"):
        fit(tiny_client(data, methods={"mine": Returns()}), data)


@pytest.mark.parametrize("moment", ["begin_task", "end_task"])
def test_moments_that_a_task_free_method_never_hears_of_are_refused(moment: str) -> None:
    kind: Any = type("Free", (Method,), {"task_free": True, moment: lambda self, plan: None})
    with pytest.raises(ConfigError, match=rf"methods\.mine = 'Free\.{moment}' cannot work; valid: no such function"):
        Composition({"mine": kind()}).check(tiny_data())


def test_a_model_for_tests_is_another_one() -> None:
    class Halves(Method):
        def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.mul_(0.5) for name, tensor in model.items()}

    class Half(Method):
        def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor * 0.5 for name, tensor in model.items()}

    data = tiny_data()
    fit(tiny_client(data, methods={"mine": Half()}), data)
    with pytest.raises(RuntimeError, match=r"methods\.mine\.model_for changes the model in place"):
        fit(tiny_client(data, methods={"mine": Halves()}), data)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            {"pulls": lambda self, cohort: [1.0]},
            r"methods\.mine\.pulls gives no mapping of names to Pull, but \[1\.0\]",
        ),
        (
            {"pulls": lambda self, cohort: dict(cohort.parameters)},
            r"methods\.mine\.pulls gives no mapping of names to Pull",
        ),
        ({"penalty": lambda self, cohort: 0.5}, r"methods\.mine\.penalty gives float, no tensor of \[k\] numbers"),
    ],
)
def test_values_of_another_kind_name_the_method(members: dict[str, Any], said: str) -> None:
    data, kind = tiny_data(), type("Odd", (Method,), members)
    with pytest.raises(RuntimeError, match=said):
        fit(tiny_client(data, methods={"mine": kind()}), data)


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[:1] for name, value in tensors.items()}


def without_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if "bias" not in name}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"model_for": lambda self, task, model: None}, "model_for gives NoneType, not a dict"),
        (
            {"model_for": lambda self, task, model: halved(model)},
            r"model_for gives .* of shape \[1, 16\], not \[8, 16\]",
        ),
        (
            {"model_for": lambda self, task, model: {name: value.double() for name, value in model.items()}},
            "model_for gives .* as torch.float64, not as torch.float32",
        ),
        ({"classify": lambda self, task, model, x: [0.0]}, r"classify gives list, not scores \[40, 4\]"),
        (
            {"classify": lambda self, task, model, x: torch.tensor([0, 0, 0, -torch.inf]).expand(len(x), 4)},
            r"classify gives scores that are NaN or infinite",
        ),
        ({"releases": lambda self, plan: {"update": 1.0}}, "releases gives no mapping of topics to Noise"),
    ],
)
def test_models_scores_and_releases_of_another_kind_are_refused(members: dict[str, Any], said: str) -> None:
    data = tiny_data()
    with pytest.raises((RuntimeError, TypeError), match=rf"methods\.mine\.{said}"):
        fit(tiny_client(data, methods={"mine": type("Mine", (Method,), members)()}), data)


@pytest.mark.parametrize(
    ("bounded", "mean", "said"),
    [
        (None, dict, "bounded_updates gives NoneType, not a dict"),
        (without_biases, dict, "bounded_updates gives no head.bias: it must return all 4"),
        (halved, dict, r"bounded_updates gives .* of shape \[1, 8, 16\], not \[\d, 8, 16\]"),
        (
            lambda updates: {**updates, "more": torch.zeros(9)},
            dict,
            r"bounded_updates gives more of shape \[9\], not \[\d\]",
        ),
        (dict, None, "protected_mean gives NoneType, not a dict"),
        (dict, without_biases, "protected_mean gives no head.bias: it must return all 4"),
        (dict, halved, r"protected_mean gives .* of shape \[1, 16\], not \[8, 16\]"),
    ],
)
def test_updates_of_another_kind_are_refused(bounded: Any, mean: Any, said: str) -> None:
    """They would leave the model as it is, or be broadcast."""

    class Protects(Method):
        def bounded_updates(self, updates: dict[str, Tensor]) -> Any:
            return bounded and bounded(updates)

        def protected_mean(self, sums: dict[str, Tensor]) -> Any:
            return mean and mean(sums)

    data = tiny_data()
    with pytest.raises(RuntimeError, match=rf"methods\.mine\.{said}"):
        fit(tiny_client(data, methods={"mine": Protects()}), data)


class Forgetful(Method):
    def setup(self, context: Context) -> None:
        pass


def test_a_setup_that_adds_parameters_is_refused() -> None:
    """They would neither be sent nor kept, as they are when ``extend_network`` adds them."""

    class Late(Method):
        def setup(self, context: Context) -> None:
            super().setup(context)
            context.network.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))

    class InTime(Method):
        def extend_network(self, network: torch.nn.Module) -> None:
            network.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))

    data = tiny_data()
    with pytest.raises(ConfigError, match=r"methods\.mine = 'Late\.setup adding scale' .* an extend_network"):
        fit(tiny_client(data, methods={"mine": Late()}), data)
    assert "scale" in fit(tiny_client(data, methods={"mine": InTime()}), data).model.shared_parameters


def test_a_method_that_moves_the_model_after_a_round_declares_it() -> None:
    """FOT, whose guarantee it would undo, then refuses it."""

    class Silent(Method):
        @torch.no_grad()
        def end_round(self, plan: RoundPlan) -> None:
            self.context.state_tensors()["head.bias"].mul_(0.5)

    class Said(Silent):
        moves_model_after_round = True

    class SaidByProperty(Silent):
        @property
        def moves_model_after_round(self) -> bool:  # type: ignore[override]
            return True

    data = tiny_data()
    for kind in (Said, SaidByProperty):
        fit(tiny_client(data, methods={"mine": kind()}), data)
    with pytest.raises(
        RuntimeError, match=r"methods\.mine\.end_round changes the global model, in head\.bias; its class"
    ):
        fit(tiny_client(data, methods={"mine": Silent()}), data)
    with pytest.raises(ConfigError, match="fot"):
        fit(tiny_client(data, methods={"fot": FOT(), "mine": Said()}), data)


def _changes(kind: str) -> type[Method]:
    """A method that changes the global model in one of its functions."""

    @torch.no_grad()
    def change(self: Method, cohort: Cohort, given: Any) -> Any:
        self.context.state_tensors()["head.bias"].mul_(0.5)
        return given

    def start(self: Method, cohort: Cohort) -> None:
        change(self, cohort, None)

    return type("Mine", (Method,), {kind: start if kind == "start_clients" else change})


@pytest.mark.parametrize("kind", ["start_clients", "extend_batch", "finish_clients"])
def test_a_method_that_changes_the_global_model_while_clients_train_is_refused(kind: str) -> None:
    data = tiny_data()
    with pytest.raises(
        RuntimeError, match=rf"methods\.mine\.{kind} changes the global model, in head\.bias; change a copy"
    ):
        fit(tiny_client(data, methods={"mine": _changes(kind)()}), data)


def test_methods_that_cannot_be_hashed_and_functions_of_the_object_work() -> None:
    """A dataclass has no hash, and a capability may be an attribute of the object."""

    @dataclass
    class Data(FedProx):
        mu: float = 0.5

    class Late(Method):
        def __init__(self) -> None:
            self.extend_batch = lambda cohort, batch: batch

    data = tiny_data()
    found = fit(tiny_client(data, methods={"data": Data(), "late": Late()}), data)
    expected = fit(tiny_client(tiny_data(), methods={"prox": FedProx(0.5)}), tiny_data())
    assert all(torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(found).items())


def test_a_forward_pass_that_moves_running_statistics_is_refused() -> None:
    """A teacher in training mode would put the statistics of single clients into the global model."""

    class Teacher(Method):
        training = True

        def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
            network = self.context.network
            with torch.no_grad(), nullcontext() if self.training else evaluation_mode(network):
                return batch.with_extras({"z": torch.stack([network(x) for x in batch.x])})

    class Right(Teacher):
        training = False

    data = tiny_data()
    fit(tiny_client(data, norm_net, methods={"mine": Right()}), data)
    with pytest.raises(RuntimeError, match=r"extend_batch changes the global model, in conv_norm\.\w+; .*evaluation"):
        fit(tiny_client(data, norm_net, methods={"mine": Teacher()}), data)


@pytest.mark.parametrize("moment", ["begin_task", "end_task", "end_round"])
def test_a_state_that_is_the_global_model_itself_is_refused(moment: str) -> None:
    """It would change with every round: a teacher would be the student."""

    def keep(self: Any, plan: RoundPlan) -> None:
        self.old = {"teacher": [tensor.detach() for tensor in self.context.state_tensors().values()]}

    def copy(self: Any, plan: RoundPlan) -> None:
        self.old = {"teacher": [tensor.detach().clone() for tensor in self.context.state_tensors().values()]}

    for function in (keep, copy):
        method: Any = type("Mine", (Method,), {"state": ("old",), "old": None, moment: function})()
        data = tiny_data()
        refused = pytest.raises((RuntimeError, TypeError), match=r"methods\.mine: state holds, in old, .* keep a copy")
        with refused if function is keep else nullcontext():
            fit(tiny_client(data, norm_net, methods={"mine": method}), data).state_dict()


def test_a_setup_without_that_of_the_base_class_is_refused() -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"methods\.mine = 'Forgetful'.*valid: a setup that calls super\(\)\.setup"):
        fit(tiny_client(data, methods={"mine": Forgetful()}), data)


def test_a_misspelt_scenario_is_the_methods_fault() -> None:
    kind: Any = type("Mine", (Method,), {"scenarios": frozenset({"domain", "tsk"})})
    valid = "class, density, detection, domain, regression, task"
    with pytest.raises(ConfigError, match=rf"methods\.mine = 'Mine\.scenarios with tsk'.*names among {valid}"):
        fit(tiny_client(data := tiny_data(), methods={"mine": kind()}), data)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"bounded_updates": lambda self, updates: updates}, r"Mine\.bounded_updates' .*protected_mean beside it"),
        ({"end_found_task": lambda self, plan, rounds: None}, r"Mine\.end_found_task' .*follow_found_tasks beside it"),
        ({"optimizers": "AdamW"}, r"Mine\.optimizers = 'AdamW'.*a frozenset of names"),
        ({"optimizers": {"SGD", "adam"}}, r"Mine\.optimizers with adam'.*valid: names among ASGD, Adadelta, "),
        ({"optimizers": {torch.optim.SGD}}, r"Mine\.optimizers with <class .*valid: names among"),
        ({"state": "old"}, r"Mine\.state = 'old'.*a tuple of names"),
        ({"state": ("old", 3)}, r"Mine\.state = \('old', 3\).*a tuple of names"),
        ({"state": ("_rows", "rows")}, r"Mine\.state = \('_rows', 'rows'\).*saves both _rows and rows under 'rows'"),
        ({"state": None}, r"Mine\.state = None.*a tuple of names"),
        ({"kind": "projekt"}, r"Mine\.kind = 'projekt'.*add, project or look"),
    ],
)
def test_members_that_would_do_nothing_are_refused(members: dict[str, Any], said: str) -> None:
    data, method = tiny_data(), type("Mine", (Method,), members)()
    adam = partial(torch.optim.Adam, lr=0.01)
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, mlp, adam, {"mine": method}), data)


@pytest.mark.parametrize("name", ["penalty", "report", "recall", "setup", "state"])
def test_an_attribute_that_hides_what_is_called_or_saved_is_refused(name: str) -> None:
    data, method = tiny_data(), Method()
    setattr(method, name, ("n",) if name == "state" else 0.1)
    said = r"self\.state' .*of the class" if name == "state" else rf"Method\.{name} = 0\.1' .*called as a function"
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, methods={"mine": method}), data)


@pytest.mark.parametrize("engine", [EngineOptions("vmap"), EngineOptions("workers", 1)])
@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"right_factors": lambda self, cohort: None}, "right_factors gives no mapping of names to RightFactor"),
        ({"right_factors": lambda self, cohort: {"w": torch.eye(2)}}, "right_factors gives no mapping"),
        (
            {"right_factors": lambda self, cohort: {"w": RightFactor(torch.eye(2)[None])}},
            "right_factors names w, no parameter",
        ),
        ({"step_factors": lambda self, cohort: 0.5}, r"step_factors gives 0\.5, no tensor \["),
        ({"step_factors": lambda self, cohort: torch.ones(9)}, r"step_factors gives tensor.*, no tensor \["),
        ({"frozen_parameters": lambda self, cohort: "head.weight"}, "frozen_parameters gives 'head.weight', no names"),
        ({"frozen_parameters": lambda self, cohort: ["heads.weight"]}, "frozen_parameters gives .*no names of param"),
        ({"frozen_parameters": lambda self, cohort: None}, "frozen_parameters gives None, no names of parameters"),
        ({"extend_batch": lambda self, cohort, batch: None}, "extend_batch gives NoneType, not a CohortBatch"),
    ],
)
def test_returned_values_of_another_kind_name_method_and_function(
    members: dict[str, Any], said: str, engine: EngineOptions
) -> None:
    data = tiny_data()
    method = type("Mine", (Method,), members)()
    with pytest.raises(Exception, match=rf"methods\.mine\.{said}"):
        fit(tiny_client(data, mlp, sgd, {"mine": method}, engine), data)


def test_a_report_holds_plain_values_and_rows_of_the_same_columns() -> None:
    """Torch's and NumPy's single numbers count as plain."""
    fine = check_report("mine", Report({"a": torch.tensor(2.0), "b": [1, "x"]}, [{"c": 1}, {"c": 2}]))
    assert (fine.figures, fine.rows) == ({"a": 2.0, "b": [1, "x"]}, [{"c": 1}, {"c": 2}])
    with pytest.raises(TypeError, match=r"methods\.mine: report's figure a is a Tensor, which is no plain value"):
        check_report("mine", Report({"a": torch.ones(3)}))
    with pytest.raises(TypeError, match=r"methods\.mine: report's rows differ in the columns d"):
        check_report("mine", Report({}, [{"c": 1}, {"c": 2, "d": 3}]))


@pytest.mark.parametrize(
    ("report", "said"),
    [(None, "report gives NoneType"), (Report({"a": torch.ones(3)}), "figure a is a Tensor, which is no plain value")],
)
def test_a_wrong_report_is_refused_before_training(report: Any, said: str) -> None:
    trained: list[int] = []
    members = {"report": lambda self: report, "end_round": lambda self, plan: trained.append(plan.round)}
    data = tiny_data()
    with pytest.raises(ConfigError, match=rf"methods\.mine = 'Mine\.report' .*{said}"):
        fit(tiny_client(data, methods={"mine": type("Mine", (Method,), members)()}), data)
    assert not trained


def test_a_report_may_need_a_finished_round() -> None:
    class Reports(Method):
        def report(self) -> Report:
            return Report({"mean": 1 / self.context.round})

    data = tiny_data()
    assert fit(tiny_client(data, methods={"mine": Reports()}), data).finished


def own_topic(name: str) -> Any:
    def end_task(self: Method, plan: RoundPlan) -> None:
        context = self.context
        for client in context.extra_round(plan.task, context.members(plan.task)):
            context.channel.uplink(name, {"one": torch.ones(1, 2)}, [1.0], [client])
        assert torch.equal(context.channel.mean(name)["one"], torch.ones(2))

    return end_task


def sends_zeros(self: Method, cohort: Cohort, positions: Sequence[int]) -> None:
    rows = {name: torch.zeros(len(positions), *value.shape[1:]) for name, value in cohort.parameters.items()}
    self.context.channel.uplink("update", rows, [1.0] * len(positions), [cohort.clients[p] for p in positions])


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"finish_clients": sends_zeros}, "uplink"),
        ({"end_task": own_topic("update")}, "uplink"),
        ({"end_round": lambda self, plan: self.context.channel.mean("update")}, "mean"),
        ({"task_free": True, "end_round": lambda self, plan: self.context.channel.sum("update")}, "sum"),
    ],
)
def test_the_topic_of_the_updates_is_refused(members: dict[str, Any], what: str) -> None:
    """A message of the updates' names and shapes would be averaged with them, without an error."""
    data, said = tiny_data(), rf"methods\.mine = \"channel\.{what} with the topic 'update'\" .*valid: another topic"
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, methods={"mine": type("Mine", (Method,), members)()}), data)


class Counts(Method):
    """Counts the clients that send in a task, by a function that sends and one that reads."""

    individual_uplinks = True

    def __init__(self, send: str, read: str, moment: str) -> None:
        self.send, self.counts = send, list[int]()
        if moment == "end_round":
            self.end_round = partial(self.count, read)  # type: ignore[method-assign]
        elif moment == "end_task":
            self.end_task = partial(self.count, read)  # type: ignore[method-assign]

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        clients, rows = [cohort.clients[p] for p in positions], {"one": torch.ones(len(positions), 1)}
        weights = {"weights": [1.0] * len(clients)} if self.send == "uplink" else {}
        getattr(self.context.channel, self.send)("mine", rows, clients=clients, **weights)

    def count(self, read: str, plan: RoundPlan) -> None:
        found = getattr(self.context.channel, read)("mine")
        self.counts.append(len(found) if read == "collect_individually" else int(found[1]))


@pytest.mark.parametrize("moment", ["end_round", "end_task", "never"])
@pytest.mark.parametrize(("send", "read"), [("uplink", "sum"), ("uplink_individually", "collect_individually")])
def test_messages_are_read_in_the_round_in_which_they_are_sent(send: str, read: str, moment: str) -> None:
    """A checkpoint has none of them, so a resumed run would read the sum of the later rounds alone."""
    data, method = tiny_data(schedule={"rounds_per_task": 2}), Counts(send, read, moment)
    if moment == "end_round":
        fit(tiny_client(data, methods={"mine": method}), data)
        assert method.counts == [data.num_clients] * data.num_rounds
        return
    said = (
        rf"methods\.mine = \"channel\.{send} .* 'mine', .* round 0\" .*valid: channel\.{read}\('mine'\) in end_round or"
    )
    with pytest.raises(ConfigError, match=said):
        fit(tiny_client(data, methods={"mine": method}), data)


@pytest.mark.parametrize("moment", ["start_clients", "finish_clients", "extend_batch"])
def test_a_replaced_parameter_of_a_cohort_is_refused(moment: str) -> None:
    """The optimizer would not see the new tensor."""

    def replace(self: Method, cohort: Cohort, given: Any = None) -> Any:
        cohort.parameters["head.weight"] = cohort.parameters["head.weight"] * 2
        return given

    method: Any = type("Mine", (Method,), {moment: replace})()
    said = rf"methods\.mine\.{moment} replaces cohort\.parameters\['head\.weight'\]; .*\.data\.copy_\(...\)"
    with pytest.raises(RuntimeError, match=said):
        fit(tiny_client(data := tiny_data(), methods={"mine": method}), data)


def test_other_topics_are_the_methods_own() -> None:
    data, kind = tiny_data(), type("Mine", (Method,), {"end_task": own_topic("mine")})
    federation = fit(tiny_client(data, methods={"mine": kind()}), data)
    assert federation.channel.uplink_bytes["mine"] == 4 * 2 * sum(len(federation.members(task)) for task in range(2))
