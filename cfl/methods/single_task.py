"""Single-task training: what each task reaches on its own."""

from __future__ import annotations

from typing import Any

import torch

from cfl.federation import Federation
from cfl.methods.base import Method
from cfl.schedule import RoundPlan


class SingleTask(Method):
    """Every task is trained from the initial model, as if it were the only one (FOT, Table 11).

    The figure is ``acc_single_task``, the mean of the accuracy matrix's diagonal: forgetting is not what is measured,
    and ACC, FGT and BWT of such a run say nothing.

    Sends and keeps nothing of its own.
    """

    def setup(self, federation: Federation) -> None:
        """Remember the initial model."""
        super().setup(federation)
        self._initial = {name: tensor.detach().clone() for name, tensor in federation.shared_tensors().items()}

    def begin_task(self, plan: RoundPlan) -> None:
        """Go back to the initial model, with a server that has no momentum yet."""
        if plan.task == 0:
            return
        self.federation.server.velocity.clear()
        with torch.no_grad():
            for name, tensor in self.federation.shared_tensors().items():
                tensor.copy_(self._initial[name])

    def summary(self) -> dict[str, Any]:
        """Mean accuracy of each task right after it was trained, in percent."""
        diagonal = self.federation.accuracy.compute().diagonal(dim1=-2, dim2=-1)
        value = diagonal.nanmean().item()
        return {"acc_single_task": None if value != value else value}

    def state_dict(self) -> dict[str, Any]:
        """The initial model."""
        return {"initial": dict(self._initial)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._initial = dict(state["initial"])
