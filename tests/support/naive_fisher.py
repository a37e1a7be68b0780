"""The empirical Fisher information by its definition, and a method that copies gradients before a penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from cfl.engines.cohort import Cohort
from cfl.federation.federation import Federation
from cfl.methods import Method
from cfl.methods.components.curvature.fisher import FisherKind
from cfl.randomness.generators import torch_generator


@torch.enable_grad()
def mean_squared_gradients(
    network: nn.Module,
    x: Tensor,
    y: Tensor,
    kind: FisherKind = "empirical",
    outputs: Tensor | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The Fisher information by its definition: one sample and label at a time, one call of autograd for each.

    Args:
        network: evaluated in evaluation mode.
        x: ``[N, ...]`` inputs.
        y: ``[N]`` labels.
        kind: which labels count, and how much.
        outputs: ``[O]`` bool, the outputs that take part; all if not given.
        tensors: parameters and buffers in place of the network's.
    """
    model = {**dict(network.named_parameters()), **dict(network.named_buffers()), **(tensors or {})}
    leaves = {name: model[name].detach().clone().requires_grad_() for name, _ in network.named_parameters()}
    total = {name: torch.zeros_like(value) for name, value in leaves.items()}
    draws = torch.rand(len(x), 1, generator=torch_generator(0, "draw"), dtype=torch.float64)
    training = network.training
    network.eval()
    for sample, label, draw in zip(x, y, draws, strict=True):
        logits = functional_call(network, {**model, **leaves}, (sample[None],))[0]
        log_p = (logits if outputs is None else logits.masked_fill(~outputs, -torch.inf)).log_softmax(0)
        p = log_p.detach().exp()
        weights = {
            "empirical": F.one_hot(label, len(p)),
            "weighted": F.one_hot(label, len(p)) * p,
            "sampled": F.one_hot((p.cumsum(0) <= draw).sum(), len(p)),
            "expected": p,
        }[kind]
        for output in weights.nonzero().flatten().tolist():
            found = torch.autograd.grad(log_p[output], list(leaves.values()), retain_graph=True, allow_unused=True)
            for name, gradient in zip(leaves, found, strict=True):
                total[name] += 0 if gradient is None else weights[output] * gradient**2 / len(x)
    network.train(training)
    return {name: value.detach() for name, value in total.items()}


def fisher_by_loop(
    federation: Federation, task: int, client: int, model: Mapping[str, Tensor], names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], int]:
    """Sum of squared gradients of one client's samples of a task at ``model``.

    Args:
        federation: whose network and data.
        task: the task's number.
        client: the client's id.
        model: parameters and buffers by name.
        names: names of the parameters; all if not given.

    Returns:
        Name -> sum, and the number of samples.
    """
    ((x, y),) = federation.data.client_batches(task, client, 10**6, torch.device("cpu"))
    mask = federation.data.outputs.train
    outputs = None if mask is None else mask[task]
    mean = mean_squared_gradients(federation.network, x, y, outputs=outputs, tensors=model)
    return {name: mean[name] * len(y) for name in (mean if names is None else names)}, len(y)


class Before(Method):
    """Copies the gradients; it stands before a method with a penalty."""

    def adjust_gradients(self, cohort: Cohort) -> None:
        self.gradients = {n: g.clone() for n, g in cohort.gradients.items()}
