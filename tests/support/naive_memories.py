"""Federated averaging whose clients compute on their samples after every task, written plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.randomness.generators import numpy_generator
from support.naive import plain_network, train_client
from support.naive_fot import train_images
from support.tiny import NetworkFactory

Change = Callable[[nn.Module, int], None]
"""Changes the gradients of a network in place, given the network and its client."""


def run_rounds(
    data: FederatedDataModule,
    make: NetworkFactory,
    state: dict[str, Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    change: Change,
    remember: Callable[[nn.Module, int], None],
    prepare: Callable[[nn.Module, int], object] = lambda network, task: None,
) -> list[dict[str, Tensor]]:
    """Run all rounds; return the global model after each.

    Args:
        data: tasks, clients, schedule.
        make: makes the network.
        state: the network's initial values.
        make_optimizer: makes a client's optimizer.
        change: called between backward and the optimizer.
        remember: called after every task but the last with the global network in evaluation mode and the task.
        prepare: called with every network before a task's data run through it.
    """
    states = []
    for number in range(data.num_rounds):
        plan, sent = data.rounds.round(number), []
        for client in plan.clients:
            network = plain_network(data, make, state)
            prepare(network, plan.task)
            train_client(network, data, plan, client, make_optimizer, change_gradients=change)
            sent.append(copy.deepcopy(network.state_dict()))
        state = {n: torch.stack([own[n].double() for own in sent]).mean(0).to(state[n].dtype) for n in state}
        states.append(state)
        if plan.last_of_task and plan.task + 1 < data.num_tasks:
            network = plain_network(data, make, state).eval()
            prepare(network, plan.task)
            remember(network, plan.task)
    return states


def chosen_samples(data: FederatedDataModule, task: int, client: int, most: int, purpose: str) -> Tensor:
    """At most ``most`` of a client's images, in their stored order."""
    own = data.indices[task][client]
    if len(own) > most:
        picked = numpy_generator(data.seed, purpose, task, client).choice(len(own), most, replace=False)
        own = own[sorted(picked)]
    return train_images(data, task, own.tolist())


def multiply(network: nn.Module, layer: str, factor: np.ndarray) -> None:
    """Replace the gradient ``G`` of a layer's weight, viewed as ``[o, d]``, by ``G F``."""
    gradient = network.get_submodule(layer).weight.grad
    product = gradient.flatten(1).numpy() @ factor
    gradient.copy_(torch.from_numpy(product).view(gradient.shape))
