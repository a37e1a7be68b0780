"""The outputs that a round's clients have trained; the server leaves all others as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cfl.data.exposure import ONE_AT_A_TIME
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods.capabilities import crosses_tasks


class TrainedOutputs:
    """The network's outputs that had a part in the loss of any client whose message has come in the round.

    Attributes:
        mask: ``[O]`` bool; None for all outputs, as where clients have no output masks.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def add(self, cohort: Cohort, rows: Sequence[int]) -> None:
        """Add the outputs that the clients at some rows of a cohort have trained."""
        if cohort.used_outputs is not None:
            used = cohort.used_outputs[rows].any(0)
            self.mask = used if self.mask is None else self.mask | used

    def join(self, masks: Sequence[Tensor | None]) -> None:
        """Take the outputs of all processes together: their :attr:`mask`, on the CPU."""
        known = [mask for mask in masks if mask is not None]
        self.mask = torch.stack(known).any(0) if known else None

    def hold_others(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        """The server's step with that of all other outputs set to zero, so that momentum does not move them."""
        if self.mask is None:
            return step
        held = dict(step)
        for name, change in step.items():
            if name.startswith("head.") and change.ndim > 0 and len(change) == len(self.mask):
                rows = self.mask.to(change.device).view(-1, *[1] * (change.ndim - 1))
                held[name] = torch.where(rows, change, torch.zeros_like(change))
        return held


def trainable_by_anybody(federation: Federation, plan: RoundPlan) -> Tensor | None:
    """The outputs that any client could have trained in a round, ``[O]`` bool; None for all.

    With protected updates, the server's step moves these outputs in every round. Otherwise the model would reveal which
    of them the round's clients have trained, or that the round had no clients.

    Args:
        federation: the federation of the run.
        plan: the round. If clients have their own clocks, any task from that of the slowest to that of the fastest
            client counts.
    """
    data, train = federation.data, federation.data.outputs.train
    if train is None:
        return None
    schedule, first, last = federation.schedule, plan.task, plan.task
    if schedule.client_clocks:
        present = schedule.present(plan.round).tolist()
        last = max((schedule.task_at(plan.round, client) for client in present), default=last)
    alone = data.exposure in ONE_AT_A_TIME
    if not alone or any(crosses_tasks(method) for method in federation.methods.values()):
        first = 0
    if not alone and data.exposure != "cumulative":
        last = data.num_tasks - 1
    tasks = range(first, last + 1)
    whose = {t: federation.members(t) if data.order is not None else [0] for t in tasks}
    return train[sorted({data.stream_task(t, client) for t, clients in whose.items() for client in clients})].any(0)
