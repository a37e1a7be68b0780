"""A method from the literature, written with nothing but docs/writing-a-method.md at hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.tiny import NetworkFactory, double, fit, five_unequal, norm_net, permuted, sgd, split, tiny_client
from torch import Tensor
from torch.func import functional_call, grad, vmap

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.engines.quadratic_pull import Pull
from cfl.methods import Method
from cfl.models.evaluation import evaluation_mode
from cfl.runtime.errors import ConfigError
from cfl.testing import check_method


class MAS(Method):
    """Memory aware synapses (Aljundi et al., ECCV 2018): weights that outputs are sensitive to are held back.

    Every client's loss gets ``strength * sum_i O_i (w_i - w*_i)^2`` (eq 4), with ``w*`` the global model at the end of
    the last task and ``O_i`` the sum over tasks of the mean over samples of ``|d ||f(x)||^2 / d w_i|`` (section 4.1).
    """

    looks_back = True
    state = ("importance", "anchor")

    def __init__(self, strength: float = 1.0) -> None:
        if not 0 <= strength < math.inf:
            raise ConfigError("methods.mas.strength", strength, "a number of at least 0")
        self.strength = strength
        self.importance, self.anchor = dict[str, Tensor](), dict[str, Tensor]()

    def end_task(self, plan: RoundPlan) -> None:
        context, task = self.context, plan.task
        if self.strength == 0 or context.is_last(task):
            return
        for client in context.extra_round(task, context.members(task)):
            total, samples = self._sensitivity(task, client)
            message = {name: value[None] / samples for name, value in total.items()}
            context.channel.uplink(self.name, message, [samples], [client])
        tensors = context.state_tensors()
        for name, mean in context.channel.mean(self.name).items():
            self.importance[name] = self.importance.get(name, torch.zeros_like(mean)) + mean
            self.anchor[name] = tensors[name].detach().clone()

    def _sensitivity(self, task: int, client: int) -> tuple[dict[str, Tensor], int]:
        """Sum over a client's samples of the absolute gradients of the squared norm of its outputs."""
        context = self.context
        network, outputs = context.network, context.outputs_in_loss(task, client)
        own = {name: rows[0] for name, rows in context.personal_state((client,)).items()}
        model = {**context.state_tensors(), **own}
        weights = {name: model[name] for name in context.shared_parameters}

        def squared_norm(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            logits = functional_call(network, {**model, **weights}, (x[None],))[0]
            return (logits if outputs is None else logits * outputs).square().sum()

        total, samples = {name: torch.zeros_like(value) for name, value in weights.items()}, 0
        with evaluation_mode(network):
            for x, _ in context.client_batches(task, client, 100, context.device):
                for name, each in vmap(grad(squared_norm), (None, 0))(weights, x).items():
                    total[name] += each.abs().sum(0)
                samples += len(x)
        return total, samples

    def pulls(self, cohort: Cohort) -> dict[str, Pull]:
        importance, anchor = (self.importance, self.anchor)
        return {name: Pull(2 * self.strength * importance[name][None], anchor[name][None]) for name in importance}


def test_it_passes_the_check() -> None:
    check_method(
        partial(MAS, 1.0),
        reduces_to_fedavg=partial(MAS, 0.0),
        wrong_options=[partial(MAS, -1.0), partial(MAS, math.nan)],
        fedavg_in_first_task=True,
        processes=2,
    )


class Naive(Method):
    """At the end of each task: the importance by its definition, one sample and one call of autograd at a time."""

    def __init__(self) -> None:
        self.importance: dict[str, Tensor] = {}

    def end_task(self, plan: RoundPlan) -> None:
        context, network = self.context, self.context.network
        if plan.task + 1 == context.num_tasks:
            return
        model = {name: tensor.detach() for name, tensor in self.context.state_tensors().items()}
        names = [name for name, _ in network.named_parameters()]
        sums, samples = {name: torch.zeros_like(model[name]) for name in names}, 0
        for client in self.context.members(plan.task):
            mask = context.outputs_in_loss(plan.task, client)
            for x, _ in context.client_batches(plan.task, client, 1, torch.device("cpu")):
                leaves = {name: model[name].clone().requires_grad_() for name in names}
                with evaluation_mode(network), torch.enable_grad():
                    logits = functional_call(network, {**model, **leaves}, (x,))[0]
                    norm = sum(z**2 for i, z in enumerate(logits) if mask is None or mask[i])
                for name, found in zip(names, torch.autograd.grad(norm, list(leaves.values())), strict=True):  # type: ignore[arg-type]
                    sums[name] += found.abs()
                samples += 1
        for name, value in sums.items():
            self.importance[name] = self.importance.get(name, torch.zeros_like(value)) + value / samples


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_importance_is_that_of_the_definition(scenario: Any) -> None:
    mas, naive = MAS(0.1), Naive()
    stream = permuted(3) if scenario == "domain" else split(3, classes=6)
    data = five_unequal(stream, scenario=scenario, schedule={"rounds_per_task": 2})
    network: NetworkFactory = double(norm_net)
    federation = fit(tiny_client(data, network, sgd, {"mas": mas, "naive": naive}), data)
    assert federation.schedule.num_rounds == 6
    assert mas.importance.keys() == naive.importance.keys() == {n for n, _ in federation.network.named_parameters()}
    for name, value in naive.importance.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(mas.importance[name], value, rtol=1e-10, atol=1e-12)
    assert float(naive.importance["conv.weight"].max()) > 0.1
