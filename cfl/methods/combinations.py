"""Refuses methods that cannot work beside each other, with the data, or with the clients' optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from cfl.data.datamodule import FederatedDataModule
from cfl.data.exposure import UNANNOUNCED
from cfl.data.scenarios import EVERY_SCENARIO
from cfl.federation.federation import OF_ALL
from cfl.methods.base import Method
from cfl.methods.capabilities import (
    ForwardPass,
    FoundTasks,
    GradientTransform,
    LocalObjective,
    Replay,
    RightMultiplication,
    SampleWeights,
    UpdateProtection,
    has,
)
from cfl.methods.member_names import check_optimizer_names
from cfl.runtime.errors import ConfigError

Methods = Mapping[str, Method]


def check_losses(methods: Methods) -> None:
    """Refuse methods that replace the same part of the local loss.

    Raises:
        ConfigError: two methods replace the whole loss, the loss of own samples, or the forward pass; or one replaces
            the whole loss and another needs logits stored.
    """
    whole = [m for m in methods.values() if has(m, LocalObjective)]
    own = [m for m in methods.values() if has(m, SampleWeights) and m.replaces_own_loss]
    passing = [m for m in methods.values() if passes_forward(m)]
    for several, valid in (
        (whole if len(whole) > 1 else [], "at most one method that replaces the whole local loss"),
        ([*whole, *own], "at most one method that replaces the loss of a client's own samples"),
        ([*whole, *passing], "at most one method that takes the forward pass into its own hands"),
    ):
        if len(several) > 1:
            raise ConfigError("methods", _classes(several), valid)
    keeping = [m for m in methods.values() if _keeps_logits(m)]
    if whole and keeping:
        valid = "no method that keeps logits beside one that replaces the local loss"
        raise ConfigError("methods", _classes([*whole, *keeping]), valid)


def passes_forward(method: Method) -> bool:
    """Whether a method computes the forward pass itself, with its present options."""
    return has(method, ForwardPass) and method.passes_forward


def _keeps_logits(method: Any) -> bool:
    return has(method, Replay) and method.replays_logits


def _classes(methods: list[Method]) -> str:
    return " and ".join(type(method).__name__ for method in methods)


def check_data(methods: Methods, data: FederatedDataModule) -> None:
    """Refuse methods with a reserved name, or that cannot work with the data's scenario, order, clocks or exposure.

    No file is read.

    Raises:
        ConfigError: naming the setting and the method that cannot work with it.
    """
    exposure, schedule, spread = data.exposure, data.schedule, data.schedule.clock_spread
    for name, method in methods.items():
        if name in OF_ALL:
            raise ConfigError(f"methods.{name}", name, "another name: clients send or keep something else under it")
        who = f"methods.{name} ({type(method).__name__})"
        if unknown := sorted(set(method.scenarios) - EVERY_SCENARIO):
            valid = f"names among {', '.join(sorted(EVERY_SCENARIO))}"
            raise ConfigError(f"methods.{name}", f"{type(method).__name__}.scenarios with {unknown[0]}", valid)
        needs_steps = f"null: {who} needs clients to learn the same tasks in step"
        needs_clock = f"0: {who} needs clients to change tasks together"
        needs_ends = f"another exposure while {who} needs to know where tasks end"
        if has(method, FoundTasks):
            needs_ends += ", or the method FoundBoundaries beside it"
        needs_past = f"another exposure while {who} looks back to tasks that ended"
        known = f"one of {sorted(method.scenarios)} while {who} is used"
        coupled = has(method, UpdateProtection) and schedule.sampling == "poisson" and schedule.client_dropout > 0
        needs_own = (
            f"0 with schedule.sampling = poisson and {who}, which needs clients that join or stay away independently "
            "of each other"
        )
        in_step = data.order is not None and method.common_order
        for refused, key, value, valid in (
            (data.scenario not in method.scenarios, "data.scenario", data.scenario, known),
            (in_step, "data.sequences", type(data.sequences).__name__, needs_steps),
            (data.rounds.client_clocks and not method.client_clocks, "schedule.clock_spread", spread, needs_clock),
            (exposure in UNANNOUNCED and not method.task_free, "data.exposure", exposure, needs_ends),
            (exposure == "joint" and method.looks_back, "data.exposure", exposure, needs_past),
            (coupled, "schedule.client_dropout", schedule.client_dropout, needs_own),
        ):
            if refused:
                raise ConfigError(key, value, valid)


def check_task_ends(methods: Methods, data: FederatedDataModule) -> None:
    """Refuse a schedule in which no client joins the last round of a task, if a method needs clients after it.

    Raises:
        ConfigError: naming the methods, the round and its task.
    """
    asking = [f"methods.{name}" for name, method in methods.items() if _asks_after_tasks(method)]
    if data.schedule.sampling == "fixed" or not asking:
        return
    for round in range(data.num_rounds):
        plan = data.rounds.round(round)
        if plan.last_of_task and not plan.clients:
            when = f"nobody joins round {round}, the last of task {plan.task}"
            valid = f"fixed, more schedule.clients_per_round, or another seed with {', '.join(asking)}: {when}"
            raise ConfigError("schedule.sampling", "poisson", valid)


def _asks_after_tasks(method: Method) -> bool:
    """Whether a method lets clients compute or send something after the last round of a task."""
    ends = type(method).end_task is not Method.end_task and not method.task_free
    return ends and method.asks_after_tasks


def check_protection(methods: Methods) -> None:
    """Refuse two methods that protect updates, and such a method beside one that reads single clients' messages.

    Raises:
        ConfigError: naming the methods.
    """
    protecting = [name for name, method in methods.items() if has(method, UpdateProtection)]
    if len(protecting) > 1:
        raise ConfigError("methods", protecting, "at most one method that adds noise to the sum of updates")
    single = [name for name, method in methods.items() if method.individual_uplinks]
    if protecting and single:
        valid = f"methods that read sums beside {protecting[0]}; {', '.join(single)} reads single clients' messages"
        raise ConfigError("methods", list(methods), valid)


def check_optimizer(methods: Methods, optimizer: Optimizer, clipping: str | None) -> None:
    """Refuse an optimizer, or a way of clipping gradients, under which a method's guarantee does not hold.

    Args:
        methods: of the run, by name.
        optimizer: one like those of the clients.
        clipping: how gradients are clipped (``norm`` or ``value``), or None if they are not.

    Raises:
        ConfigError: naming the setting and the method, or a method whose ``optimizers`` are no names of optimizers.
    """
    name = type(optimizer).__name__
    for key, method in methods.items():
        check_optimizer_names(key, method)
        if method.optimizers is not None and name not in method.optimizers:
            valid = f"one of {sorted(method.optimizers)} while methods.{key} is used"
            raise ConfigError("model.optimizer", name, valid)
    turned = [f"methods.{key}" for key, method in methods.items() if _says_where_steps_point(method)]
    if clipping == "value" and turned:
        valid = f"norm while {', '.join(turned)} says where gradients may point"
        raise ConfigError("trainer.gradient_clip_algorithm", "value", valid)


def _says_where_steps_point(method: Method) -> bool:
    """Whether a method's guarantee depends on the direction of the step."""
    return has(method, RightMultiplication) or (has(method, GradientTransform) and method.kind == "project")
