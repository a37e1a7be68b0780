"""Composes several methods: calls them in their order, and finds the work that engines take over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import shown_task
from cfl.engines.base import Engine
from cfl.engines.cohort import Cohort
from cfl.engines.objective import LossParts
from cfl.engines.quadratic_pull import Pull, add_pulls
from cfl.engines.right_factors import RightFactor, multiply_gradients
from cfl.federation.channel import Channel
from cfl.federation.federation import Federation
from cfl.federation.method_protocol import MethodComposition
from cfl.methods import declared_state
from cfl.methods.base import Method
from cfl.methods.capabilities import (
    BatchExtension,
    BoundaryFinder,
    FoundTasks,
    FrozenParameters,
    GradientTransform,
    LearningRateFactors,
    LocalObjective,
    NetworkExtension,
    NoisySums,
    Penalty,
    PersonalModel,
    PersonalParameters,
    Predictor,
    Regularizer,
    Replay,
    RightMultiplication,
    SampleLoss,
    SampleWeights,
    ServerTransform,
    TaskModel,
    UpdateProtection,
    has,
)
from cfl.methods.combinations import check_data, check_losses, check_protection, check_task_ends, passes_forward
from cfl.methods.context import Context
from cfl.methods.member_names import check_members
from cfl.methods.own_topics import OwnTopics
from cfl.methods.returned_values import (
    check_added,
    check_factors,
    check_frozen,
    check_penalty,
    check_pulls,
    check_releases,
    check_report,
    check_scores,
    check_step_factors,
    check_tensors,
)
from cfl.methods.task_free import task_free_cohort, task_free_context, task_free_plan
from cfl.metrics.accuracy import AccuracyMatrix
from cfl.privacy.release import Noise
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError

Pulls = Mapping[str, Pull]
Factors = Mapping[str, RightFactor]

COPY_IT = "change a copy, and compute with context.network in evaluation_mode"
"""What a method is to do that changes the global model where it must not."""


class Composition(MethodComposition):
    """The methods of a run by name, with functions that call all of them.

    Methods are called in the order of the configuration. At most one method may replace the local loss, and at most one
    the forward pass; two are refused. If several methods classify, the first one that returns scores counts. A method
    that declares ``task_free`` gets handles in place of tasks.

    Args:
        methods: name -> method.
    """

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = dict(methods)
        self._cohort: Cohort | None = None
        self._task_free: Cohort | None = None
        self._pulls: dict[str, Pulls] = {}
        self._factors: dict[str, Factors] = {}
        self._multiplied: str | None = None
        self._having: dict[type, dict[str, Any]] = {}
        self._tensors: Callable[[], dict[str, Tensor]] = dict  # the global model's, from setup on
        for finder in self.with_capability(BoundaryFinder).values():
            for method in self.with_capability(FoundTasks).values():
                method.follow_found_tasks(finder)

    def __getitem__(self, name: str) -> Method:
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    def with_capability(self, capability: Any) -> dict[str, Any]:
        """The methods that have a capability, by name."""
        if capability not in self._having:  # cached: called in every local step
            found = {name: method for name, method in self._methods.items() if has(method, capability)}
            self._having[capability] = found
        return self._having[capability]

    # Before training.

    def extend(self, network: nn.Module, seed: int) -> None:
        """Let methods add parameters to the network, with separately seeded random numbers."""
        for method in self.with_capability(NetworkExtension).values():
            torch.manual_seed(seed_for(seed, f"extend network, {type(method).__name__}"))
            method.extend_network(network)

    def loss_parts(self) -> LossParts:
        """The methods that take part in the clients' losses.

        Raises:
            ConfigError: see :func:`cfl.methods.combinations.check_losses`.
        """
        check_losses(self)
        weighers = tuple(self.with_capability(SampleWeights).values())
        terms = tuple(self.with_capability(SampleLoss).values())
        return LossParts(
            weighers,
            terms,
            next(iter(self.with_capability(LocalObjective).values()), None),
            next((method for method in self.values() if passes_forward(method)), None),
            all(method.reweighs_added_only for method in (*weighers, *terms)),
        )

    def check(self, data: FederatedDataModule) -> None:
        """Refuse methods that cannot work with the data or beside each other.

        Raises:
            ConfigError: see :meth:`check_settings` and :func:`cfl.methods.combinations.check_task_ends`.
        """
        self.check_settings(data)
        check_task_ends(self, data)

    def check_settings(self, data: FederatedDataModule) -> None:
        """Refuse methods that the settings alone rule out. No file is read, so that sweeps can call it before a run.

        Raises:
            ConfigError: see :func:`cfl.methods.combinations.check_losses`,
                :func:`cfl.methods.combinations.check_data`, :func:`cfl.methods.combinations.check_protection` and
                :func:`cfl.methods.member_names.check_members`.
        """
        check_members(self)
        check_losses(self)
        check_data(self, data)
        check_protection(self)

    @property
    def protection(self) -> Any:
        """The method that protects updates, or None."""
        return next(iter(self.with_capability(UpdateProtection).values()), None)

    def bounded_updates(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """The messages ``[k, ...]`` that clients send in place of ``updates``, as :attr:`protection` bounds them.

        Raises:
            TypeError, ValueError: see :func:`cfl.methods.returned_values.check_tensors`.
        """
        method, given = self.protection, dict(updates)
        rows = len(next(iter(updates.values()))) if updates else None
        return check_tensors(f"{method.key}.bounded_updates", method.bounded_updates(given), updates, "more", rows)

    def protected_mean(self, sums: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of the clients' updates, by :attr:`protection`; ``wanted`` has tensors of its names and shapes.

        Raises:
            TypeError, ValueError: see :func:`cfl.methods.returned_values.check_tensors`.
        """
        method = self.protection
        return check_tensors(f"{method.key}.protected_mean", method.protected_mean(sums), wanted, "more")

    def releases(self, plan: RoundPlan) -> dict[str, Noise]:
        """Topic -> noise in its sum, for all noisy sums that the server reads in a round."""
        found: dict[str, Noise] = {}
        for method in self.with_capability(NoisySums).values():
            released = method.releases(task_free_plan(plan) if method.task_free else plan)
            check_releases(method.key, released)
            found |= released
        return found

    def setup(self, federation: Federation) -> None:
        """Set every method up with its own context; a task-free method gets one without tasks.

        Raises:
            ConfigError: a method's ``setup`` has not called that of its base class, adds tensors to the network, or
                refuses a setting; or an earlier run has used the object, whose state it may still hold.
        """
        self._tensors = federation.model.state_tensors
        there = set(self._tensors())
        for name, method in self.items():
            if "context" in vars(method):
                kind = type(method).__name__
                raise ConfigError(f"methods.{name}", f"{kind} of an earlier run", f"a new {kind} for every run")
            context = Context(federation)
            context.channel = cast(Channel, OwnTopics(federation.channel, f"methods.{name}"))
            method.setup(task_free_context(context) if method.task_free else context)
            if not hasattr(method, "context"):
                raise ConfigError(f"methods.{name}", type(method).__name__, "a setup that calls super().setup(context)")
            if added := sorted(set(self._tensors()) - there):  # nobody would send or keep them
                what = f"{type(method).__name__}.setup adding {', '.join(added)}"
                raise ConfigError(f"methods.{name}", what, "an extend_network that adds them")
            declared_state.check(method.key, method)

    def keeps_local(self, name: str) -> bool:
        """Whether a parameter or buffer stays on its client."""
        return any(method.keeps_local(name) for method in self.with_capability(PersonalParameters).values())

    @property
    def replays(self) -> bool:
        """Whether clients need replay buffers."""
        return bool(self.with_capability(Replay))

    @property
    def replays_logits(self) -> bool:
        """Whether buffers store the samples' logits."""
        return any(method.replays_logits for method in self.with_capability(Replay).values())

    @property
    def individual_uplinks(self) -> bool:
        """Whether the server must see single clients' messages."""
        return any(method.individual_uplinks for method in self.values())

    @property
    def strengths(self) -> list[str]:
        """The options that set the strength of the methods' pulls, by their keys in the configuration."""
        named = {name: method.pulls_with for name, method in self.items()}
        return [f"methods.{name}.{option}" for name, option in named.items() if option]

    @property
    def computes_locally(self) -> bool:
        """Whether local steps cost more than those of federated averaging."""
        return any(method.computes_locally for method in self.values())

    # Rounds and tasks.

    @contextmanager
    def _leaving_the_model(self, method: Method, moment: str, instead: str = COPY_IT) -> Iterator[None]:
        """Within the context a method must not change the global model, nor put other tensors in a cohort's parameters.

        Raises:
            TypeError: it does. The message names the method, ``moment``, a changed tensor, and what to do ``instead``.
        """
        of_class = getattr(type(method), moment, None)  # None if the object itself defines it
        silent = of_class is not None and of_class is getattr(Method, moment, None)
        tensors = {} if silent else self._tensors()
        before = [tensor._version for tensor in tensors.values()]
        yield
        if changed := [n for (n, tensor), was in zip(tensors.items(), before, strict=True) if tensor._version != was]:
            raise TypeError(f"{method.key}.{moment} changes the global model, in {changed[0]}; {instead}")
        if self._cohort is not None and (name := self._cohort.replaced) is not None:
            found = f"cohort.parameters[{name!r}]"
            raise TypeError(f"{method.key}.{moment} replaces {found}; change its values by {found}.data.copy_(...)")

    def begin_task(self, plan: RoundPlan) -> None:
        """Call the methods before a task's first round."""
        for method in self._told_of_tasks():
            method.begin_task(plan)
            if type(method).begin_task is not Method.begin_task:
                self._check_copies(method)

    def end_round(self, plan: RoundPlan) -> None:
        """Call the methods after the server has updated the global model, unless no client joined the round.

        Raises:
            TypeError: a method changes the global model and does not declare it.
        """
        self._pulls, self._factors, self._multiplied = {}, {}, None
        declared = "its class has to say moves_model_after_round = True"
        for method in self.values() if plan.clients else ():
            may = method.moves_model_after_round
            with nullcontext() if may else self._leaving_the_model(method, "end_round", declared):
                method.end_round(task_free_plan(plan) if method.task_free else plan)
        for finder in self.with_capability(BoundaryFinder).values() if plan.clients else ():
            if finder.rounds_of_ended is not None:
                for method in self.with_capability(FoundTasks).values():
                    method.end_found_task(task_free_plan(plan), finder.rounds_of_ended)

    def end_task(self, plan: RoundPlan) -> None:
        """Call the methods after a task's last round."""
        for method in self._told_of_tasks():
            method.end_task(plan)
            if type(method).end_task is not Method.end_task:
                self._check_copies(method)

    def check_all_read(self, plan: RoundPlan) -> None:
        """Refuse messages of a round that are not read when it ends.

        Raises:
            ConfigError: see :meth:`cfl.methods.own_topics.OwnTopics.check_all_read`.
        """
        for method in self.values():
            cast(OwnTopics, method.context.channel).check_all_read(plan)

    def _check_copies(self, method: Method) -> None:
        """Raise a TypeError if a method's state holds tensors of the global model in place of copies."""
        declared_state.check_copies(method.key, method.state_dict(), self._tensors())

    def _told_of_tasks(self) -> list[Method]:
        return [method for method in self.values() if not method.task_free]

    def transform_step(self, name: str, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """The server's step, as changed by one of the methods.

        Raises:
            TypeError, ValueError: see :func:`cfl.methods.returned_values.check_tensors`.
        """
        found = self.with_capability(ServerTransform)[name].transform_step(dict(step))
        return check_tensors(f"{self[name].key}.transform_step", found, step)

    @property
    def step_transforms(self) -> list[Any]:
        """The functions that change the server's step, in order."""
        return [partial(self.transform_step, name) for name in self.with_capability(ServerTransform)]

    # A cohort.

    def attend(self, cohort: Cohort) -> None:
        """Set the current cohort; task-free methods see it without its task."""
        self._cohort, self._task_free = cohort, task_free_cohort(cohort)

    def shown(self, method: Any) -> Cohort:
        """The cohort as a method may see it."""
        found = self._task_free if method.task_free else self._cohort
        if found is None:
            raise RuntimeError("no cohort: configure_optimizers has not run")
        return found

    def start_clients(self) -> None:
        """Call the methods after clients have received the model, and read the pulls and factors of all their steps."""
        self._pulls, self._factors, self._multiplied = {}, {}, None
        for method in self.values():
            with self._leaving_the_model(method, "start_clients"):
                method.start_clients(self.shown(method))
        for name, method in self.with_capability(Regularizer).items():
            cohort = self.shown(method)
            self._pulls[name] = method.pulls(cohort)
            check_pulls(method.key, self._pulls[name], cohort)
        for name, method in self.with_capability(RightMultiplication).items():
            cohort = self.shown(method)
            self._factors[name] = method.right_factors(cohort)
            check_factors(method.key, self._factors[name], cohort)

    @property
    def collects(self) -> bool:
        """Whether any method defines ``finish_clients``."""
        return any(type(method).finish_clients is not Method.finish_clients for method in self.values())

    def finish_clients(self, positions: Sequence[int]) -> None:
        """Call the methods after clients have taken their last local step."""
        for method in self.values():
            with self._leaving_the_model(method, "finish_clients"):
                method.finish_clients(self.shown(method), positions)

    def step_factors(self) -> list[Tensor | None]:
        """Each method's factors of the clients' learning rates.

        Raises:
            ValueError: see :func:`cfl.methods.returned_values.check_step_factors`.
        """
        found = []
        for method in self.with_capability(LearningRateFactors).values():
            cohort = self.shown(method)
            found.append(method.step_factors(cohort))
            check_step_factors(method.key, found[-1], cohort)
        return found

    def frozen_parameters(self) -> frozenset[str]:
        """Names of the parameters that are frozen for the cohort.

        Raises:
            ValueError: see :func:`cfl.methods.returned_values.check_frozen`.
        """
        every: frozenset[str] = frozenset()
        for method in self.with_capability(FrozenParameters).values():
            cohort = self.shown(method)
            names = method.frozen_parameters(cohort)
            check_frozen(method.key, names, cohort)
            every |= frozenset(names)
        return every

    # A local step.

    def extend_batch(self, batch: CohortBatch) -> CohortBatch:
        """The step with the samples and extras that methods add.

        Raises:
            TypeError: a method returns no step or, in a cohort's first step, changes the global model.
            TypeError, ValueError: in a cohort's first step, see :func:`cfl.methods.returned_values.check_added`.
        """
        for method in self.with_capability(BatchExtension).values():
            cohort, given = self.shown(method), batch.without_tasks() if method.task_free else batch
            # A look at all tensors in every step would take a twentieth of small steps.
            first = cohort.steps == 1
            with self._leaving_the_model(method, "extend_batch") if first else nullcontext():
                found = method.extend_batch(cohort, given)
            if not isinstance(found, CohortBatch):
                raise TypeError(f"{method.key}.extend_batch gives {type(found).__name__}, not a CohortBatch")
            if first:
                check_added(method, found, given)
            batch = found.with_tasks(batch) if method.task_free else found
        return batch

    def penalties(self, losses: Tensor) -> Tensor:
        """Add the methods' penalties to the clients' losses ``[k]``.

        Raises:
            TypeError, ValueError, ConfigError: see :func:`cfl.methods.returned_values.check_penalty`.
        """
        for method in self.with_capability(Penalty).values():
            cohort = self.shown(method)
            penalty = method.penalty(cohort)
            if penalty is not None:
                check_penalty(method, penalty, losses, cohort)
                losses = losses + penalty
        return losses

    def changing_gradients(self) -> list[str]:
        """The names of the methods that currently read or change the gradients of local steps."""
        return [
            name
            for name, method in self.items()
            if has(method, Penalty)
            or self._pulls.get(name)
            or self._factors.get(name)
            or (has(method, GradientTransform) and method.changes_gradients)
        ]

    def left_to_engine(self, engine: Engine | None) -> tuple[Pulls, Factors]:
        """The pulls or right factors that an engine applies itself, if they are the only change of gradients.

        Args:
            engine: computes the steps; None while an engine is being chosen, to which nothing is left.

        Returns:
            Pulls and factors; at least one of the two is empty. If there are factors, :meth:`adjust_gradients` does not
            apply them.
        """
        changing = self.changing_gradients()
        self._multiplied = None
        if engine is None or len(changing) != 1 or has(self[changing[0]], Penalty, GradientTransform):
            return {}, {}
        (alone,) = changing
        own_pulls, own_factors = self._pulls.get(alone, {}), self._factors.get(alone, {})
        if own_pulls and own_factors:
            return {}, {}
        if own_factors and engine.multiplies:
            self._multiplied = alone
            return {}, own_factors
        return (own_pulls, {}) if own_pulls and engine.pulls else ({}, {})

    def adjust_gradients(self) -> None:
        """Let the methods change the step's gradients, one after another."""
        transforming = self.with_capability(GradientTransform)
        for name, method in self.items():
            cohort = self.shown(method)
            if pulls := self._pulls.get(name):
                add_pulls(pulls, cohort.gradients, cohort.parameters)
            if name != self._multiplied and (factors := self._factors.get(name)):
                multiply_gradients(cohort.gradients, factors)
            if name in transforming:
                returned: Any = transforming[name].adjust_gradients(cohort)
                if returned is not None:
                    raise TypeError(f"{method.key}.adjust_gradients returns a value: it is to change cohort.gradients")

    # Models and tests.

    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that is tested on a task; the given object if no method changes it."""
        for method in self.with_capability(TaskModel).values():
            given = [tensor for tensor in model.values() if not tensor.is_inference()]  # others have no version
            before = [tensor._version for tensor in given]
            found = method.model_for(shown_task(task, method.task_free), model)
            if [tensor._version for tensor in given] != before:
                raise RuntimeError(f"{method.key}.model_for changes the model in place, with which training goes on")
            given_by = f"{method.key}.model_for"
            model = {**model, **check_tensors(given_by, found, model, "fewer", same_type=True)}
        return model

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model that a client uses for one of its tasks."""
        for method in self.with_capability(PersonalModel).values():
            found = method.recall(client, None if task is None else shown_task(task, method.task_free), model)
            model = {**model, **check_tensors(f"{method.key}.recall", found, model, "fewer", same_type=True)}
        return model

    @property
    def tells_tasks_apart(self) -> bool:
        """Whether a client may use another model for each task."""
        return any(not method.task_free for method in self.with_capability(PersonalModel).values())

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        """Scores ``[B, O]`` of the first method that returns some, or None.

        Raises:
            TypeError, ValueError: see :func:`cfl.methods.returned_values.check_scores`.
        """
        for method in self.with_capability(Predictor).values():
            found = method.classify(shown_task(task, method.task_free), model, x)
            if found is not None:
                check_scores(method.key, found, [len(x), method.context.num_outputs])
                return found
        return None

    @property
    def identified(self) -> list[AccuracyMatrix]:
        """The methods' own matrices, for the shares of test images whose highest score is of their own task."""
        found = [method.identified for method in self.with_capability(Predictor).values()]
        return [matrix for matrix in found if matrix is not None]

    # Reports and checkpoints.

    def client_storage(self) -> int:
        """Bytes that a client stores for the methods between rounds."""
        return sum(method.client_storage() for method in self.values())

    def check_reports(self) -> None:
        """Refuse wrong reports before training. One that fails because it needs a finished round is checked later.

        Raises:
            ConfigError: naming the method and what is wrong with its report.
        """
        for name, method in self.items():
            try:
                report = method.report()
            except Exception:
                continue
            try:
                check_report(name, report)
            except TypeError as error:
                valid = f"a Report of plain values whose rows have the same columns ({error})"
                raise ConfigError(f"methods.{name}", f"{type(method).__name__}.report", valid) from None

    def state_dict(self) -> dict[str, Any]:
        """Every method's state by its name.

        Raises:
            TypeError: a method's state holds tensors of the global model in place of copies.
        """
        found, tensors = {name: method.state_dict() for name, method in self.items()}, self._tensors()
        for name, state in found.items():
            declared_state.check_copies(f"methods.{name}", state, tensors)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name, method in self.items():
            method.load_state_dict(state[name])
