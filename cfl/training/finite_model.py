"""Refuses a global model with NaN or infinity."""

from __future__ import annotations

import torch

from cfl.data.schedule import RoundPlan
from cfl.federation.federation import Federation
from cfl.runtime.errors import BadUpdate


def require_finite(federation: Federation, plan: RoundPlan, cause: str) -> None:
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
