"""What the server does at the end of a round: it updates the global model, and ends the round and tasks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.federation.channel import UPDATE
from cfl.federation.federation import Federation
from cfl.methods.base import Method
from cfl.methods.composition import Composition
from cfl.runtime.errors import BadUpdate
from cfl.training.same_model import check_same_model
from cfl.training.trained_outputs import TrainedOutputs, trainable_by_anybody


def end_round(federation: Federation, plan: RoundPlan, trained: TrainedOutputs) -> None:
    """Update the global model with the messages of a round, and end the round and the tasks that end with it.

    Args:
        federation: the federation of the run.
        plan: the round.
        trained: the outputs that its clients have trained. The server does not move others.

    Raises:
        BadUpdate: the global model is not finite.
        ConfigError: a method has not read the messages that it has let clients send.
    """
    methods = cast(Composition, federation.methods)
    federation.channel.enter_round(plan.task, plan.round)
    if mean := _mean_update(federation, methods, plan):
        if methods.protection is not None:
            trained.mask = trainable_by_anybody(federation, plan)
        transforms = methods.step_transforms
        federation.server.apply(
            {n: mean[n] for n in federation.model.shared_parameters},
            {n: mean[n] for n in federation.model.shared_buffers},
            [*transforms, trained.hold_others],
        )
        transformed = "the server's step, which methods may transform"
        plain = "the sum of what clients sent, or the server's step"
        _require_finite(federation, plan, transformed if transforms else plain)
    federation.round += 1
    ended = [part for part in plan.parts if part.last_of_task]
    with federation.data.closing(plan):
        methods.end_round(plan)
        for part in ended:
            methods.end_task(part)
    methods.check_all_read(plan)
    if methods and (ended or any(type(one).end_round is not Method.end_round for one in methods.values())):
        _require_finite(federation, plan, "what methods do when it ends")
    if ended:
        check_same_model(federation)
    federation.synchronise()


def _mean_update(federation: Federation, methods: Composition, plan: RoundPlan) -> dict[str, Tensor]:
    """The mean update that the server applies; empty if no client sends one and no noise is added."""
    model, channel = federation.model, federation.channel
    if not (model.shared_parameters or model.shared_buffers):
        return {}
    if methods.protection is None:
        return channel.mean(UPDATE) if plan.clients else {}
    tensors = model.shared_tensors()
    if plan.clients:
        return methods.protected_mean(channel.sum(UPDATE)[0], tensors)
    channel.sum_of_nobody(UPDATE)
    return methods.protected_mean({name: torch.zeros_like(tensors[name]) for name in model.shared_parameters}, tensors)


def _require_finite(federation: Federation, plan: RoundPlan, cause: str) -> None:
    """Refuse a global model that is not finite, before it is saved. Clients' messages have already been checked.

    Args:
        federation: the federation of the run.
        plan: the round.
        cause: what has changed the model, for the error message.

    Raises:
        BadUpdate: the model is not finite. The message names the round, the cause and the methods.
    """
    model = federation.model
    tensors, changing = model.state_tensors(), (*model.shared_parameters, *model.shared_buffers)  # constants may be inf
    state = {name: tensors[name] for name in changing if tensors[name].is_floating_point()}
    sums = [values.detach().sum(dtype=torch.float32) for values in state.values()]
    if not sums or bool(torch.stack(sums).isfinite().all()):  # a sum is finite only if all its terms are
        return
    bad = next((name for name, values in state.items() if not bool(values.isfinite().all())), None)
    if bad is None:
        return
    names = ", ".join(f"methods.{name}" for name in federation.methods)
    raise BadUpdate(
        f"the global model has NaN or infinity in {bad} after round {plan.round} (task {plan.task}), by {cause}; what "
        f"clients sent was finite{f'; methods: {names}' if names else ''}"
    )
