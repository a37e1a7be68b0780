"""The empirical Fisher information by its definition, and a method that copies gradients before a penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import Method


def fisher_by_loop(
    federation: Federation, task: int, client: int, model: Mapping[str, Tensor], names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], int]:
    """Sum of squared gradients of one client's samples of a task at ``model``, one autograd call per sample.

    Args:
        federation: whose network and data.
        task: the task's number.
        client: the client's id.
        model: parameters and buffers by name.
        names: names of the parameters; all if not given.

    Returns:
        Name -> sum, and the number of samples.
    """
    names = [n for n, _ in federation.network.named_parameters()] if names is None else names
    mask = federation.data.outputs.train
    total = {n: torch.zeros_like(model[n]) for n in names}
    count = 0
    federation.network.eval()
    for x, y in federation.data.client_batches(task, client, 1, torch.device("cpu")):
        leaves = {n: model[n].detach().clone().requires_grad_() for n in names}
        with torch.enable_grad():
            logits = functional_call(federation.network, {**model, **leaves}, (x,))
            if mask is not None:
                logits = logits.masked_fill(~mask[task], -torch.inf)
            gradients = torch.autograd.grad(F.cross_entropy(logits, y), list(leaves.values()))
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += gradient**2
        count += 1
    federation.network.train()
    return total, count


class Before(Method):
    """Copies the gradients; it stands before a method with a penalty."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        self.gradients = {n: g.clone() for n, g in cohort.gradients.items()}
