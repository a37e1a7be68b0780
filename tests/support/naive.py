"""Federated averaging written plainly: one ordinary network and optimizer per client, one client after another.

Nothing of the engine is used except the data, the sampled clients, and the documented key of the shuffling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.data.datamodule import FederatedDataModule
from cfl.data.schedule import RoundPlan
from cfl.randomness.generators import numpy_generator
from support.tiny import NetworkFactory

Hook = Callable[[nn.Module, int], Any]
"""Called with a client's network and its id."""

Loss = Callable[[nn.Module, Tensor, Tensor, tuple[int, int, int]], Tensor]
"""Loss of a client's network on a batch ``x``, ``y``; the last argument is (round, client, step)."""


def plain_network(data: FederatedDataModule, make: NetworkFactory, state: dict[str, Tensor]) -> nn.Module:
    """The network as its class makes it, with these initial values."""
    network = make(data.input_shape, data.num_outputs)
    network.load_state_dict(state)
    return network


def local_batches(data: FederatedDataModule, plan: RoundPlan, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A client's batches of a round: inputs, labels within the task."""
    task, own, size = data.tasks[plan.task], data.indices[plan.task][client], data.schedule.batch_size
    for epoch in range(data.schedule.local_epochs):
        order = numpy_generator(data.seed, "shuffle", plan.round, client, epoch).permutation(len(own))
        for start in range(0, len(own), size):
            chosen = own[order[start : start + size]].tolist()
            if len(chosen) < size and data.schedule.drop_last:
                continue
            yield task.transform(task.train.images[chosen]), task.train.labels[chosen]


def task_loss(data: FederatedDataModule, task: int, logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over the outputs that take part: the task's own slice, or those of all (seen) tasks."""
    sizes = data.stream.classes_per_task
    if data.scenario == "domain":
        return F.cross_entropy(logits, y)
    first = sum(sizes[:task])
    if data.scenario == "task" or data.class_loss == "own":
        return F.cross_entropy(logits[:, first : first + sizes[task]], y)
    last = first + sizes[task] if data.class_loss == "seen" else sum(sizes)
    return F.cross_entropy(logits[:, :last], y + first)


def used_outputs(data: FederatedDataModule, task: int) -> slice:
    """The outputs in the loss of a task."""
    sizes = data.stream.classes_per_task
    own = data.scenario == "task" or data.class_loss == "own"
    return slice(sum(sizes[:task]) if own else 0, sum(sizes[: task + 1]) if own or data.class_loss == "seen" else None)


def train_client(
    network: nn.Module,
    data: FederatedDataModule,
    plan: RoundPlan,
    client: int,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    penalty: Hook | None = None,
    change_gradients: Hook | None = None,
    loss_of: Loss | None = None,
) -> None:
    """Train ``network`` in place on one client's batches of a round."""
    network.train()
    optimizer = make_optimizer(network.parameters())
    for step, (x, y) in enumerate(local_batches(data, plan, client)):
        if loss_of is None:
            loss = task_loss(data, plan.task, network(x), y)
        else:
            loss = loss_of(network, x, y, (plan.round, client, step))
        if penalty is not None:
            loss = loss + penalty(network, client)
        optimizer.zero_grad()
        loss.backward()
        if change_gradients is not None:
            change_gradients(network, client)
        optimizer.step()


def federated_averaging(
    network: nn.Module,
    data: FederatedDataModule,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    by_samples: bool = False,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    stays_local: Callable[[str], bool] = lambda name: False,
    drop_statistics: bool = False,
    penalty: Hook | None = None,
    change_gradients: Hook | None = None,
    unheard: Collection[int] = (),
    loss_of: Loss | None = None,
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Run all rounds from ``network``'s present values.

    Args:
        network: not changed.
        data: tasks, clients, schedule.
        make_optimizer: makes a client's optimizer.
        by_samples: weight clients by their number of samples instead of equally.
        server_lr: server learning rate.
        server_momentum: server momentum.
        stays_local: whether a tensor of this name stays with each client.
        drop_statistics: leave the global model's buffers as they are.
        penalty: added to a client's loss.
        change_gradients: called between backward and the optimizer.
        unheard: clients whose messages are never aggregated.
        loss_of: a client's loss in place of the cross-entropy.

    Returns:
        the global model's parameters and buffers, and client -> the tensors that it keeps.
    """
    state = copy.deepcopy(network.state_dict())
    parameters = {name for name, _ in network.named_parameters()}
    initial = copy.deepcopy(state)
    kept: dict[int, dict[str, Tensor]] = {}
    velocity = {name: torch.zeros_like(state[name]) for name in parameters}
    for number in range(data.num_rounds):
        plan = data.rounds.round(number)
        sent: list[tuple[float, dict[str, Tensor]]] = []
        for client in plan.clients:
            own = copy.deepcopy(network)
            start = {n: kept.get(client, initial)[n] if stays_local(n) else state[n] for n in state}
            own.load_state_dict(start)
            train_client(own, data, plan, client, make_optimizer, penalty, change_gradients, loss_of)
            result = own.state_dict()
            outputs = used_outputs(data, plan.task)
            for name in ("head.weight", "head.bias"):
                rows = start[name].clone()
                rows[outputs] = result[name][outputs]
                result[name] = rows
            kept[client] = {n: v.clone() for n, v in result.items() if stays_local(n)}
            if client in unheard:
                continue
            weight = float(len(data.indices[plan.task][client])) if by_samples else 1.0
            sent.append((weight, result))
        total = sum(weight for weight, _ in sent)
        for name in state:
            if stays_local(name) or (drop_statistics and name not in parameters):
                continue
            mean = sum(weight / total * result[name].double() for weight, result in sent)
            if name in parameters:
                velocity[name] = server_momentum * velocity[name] + (mean - state[name])
                state[name] = (state[name] + server_lr * velocity[name]).to(state[name].dtype)
            elif state[name].is_floating_point():
                state[name] = mean.to(state[name].dtype)
            else:
                state[name] = mean.round().to(state[name].dtype)
    return state, kept


def statistics(name: str) -> bool:
    """Whether a tensor of this name belongs to BatchNorm's running statistics."""
    return "running" in name or "num_batches_tracked" in name


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Percent of rows whose greatest logit is the label's."""
    return 100.0 * sum(int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True)) / len(y)
