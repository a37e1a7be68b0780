"""The exported model as a module that computes the same function as the run's tests score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from cfl.data.datamodule import FederatedDataModule
from cfl.data.task_handles import shown_task
from cfl.federation.federation import Federation
from cfl.methods.capabilities import Predictor, TaskModel
from cfl.models.base import Network
from cfl.models.density import densities_differ
from cfl.models.frozen_vit import FrozenViT
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client


@dataclass(frozen=True)
class Choice:
    """The client and the task of the exported model.

    Attributes:
        client: the client, or None for the global model.
        task: the task, or None if one model serves all tasks. With a client, the task's number in the client's own
            sequence, and None is the client's current task; otherwise the stream's number.
    """

    client: int | None = None
    task: int | None = None

    def tasks(self, data: FederatedDataModule) -> range:
        """The numbers that ``task`` may have."""
        return range(data.stream.num_tasks if self.client is None else data.num_tasks)

    def stream_task(self, data: FederatedDataModule) -> int:
        """The stream's number of the task, or of the first one if none is chosen."""
        task = self.task or 0
        return task if self.client is None else data.stream_task(task, self.client)

    def stream_tasks(self, data: FederatedDataModule) -> list[int]:
        """The stream's number of each of the :meth:`tasks`."""
        return [Choice(self.client, task).stream_task(data) for task in self.tasks(data)]


class Answer(nn.Module):
    """Maps ``[N, C, H, W]`` to the scores of tests: logits ``[N, O]``, a method's scores, or log-likelihoods ``[N]``.

    Args:
        network: holds the chosen model as plain weights.
        classifiers: methods that may compute scores in place of the network; the first one that returns scores is used.
        task: the stream's number of the task to classify for.
        client: the client; it matters if the same weights give a different density for each client.

    Attributes:
        network: the given network.
        frozen: modules that the network uses without holding their weights: frozen transformers, by name.
        task: the given task.
        client: the given client.
    """

    def __init__(self, network: nn.Module, classifiers: Iterable[Any], task: int, client: int) -> None:
        super().__init__()
        self.network = network
        held = {name: part.vit for name, part in vars(network).items() if isinstance(part, FrozenViT)}
        self.frozen = nn.ModuleDict(held)
        self.classifiers, self.task, self.client = tuple(classifiers), task, client

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        network = cast(Network, self.network)
        if self.classifiers and network.predicts == "vector":
            model: dict[str, Tensor] = {**dict(network.named_parameters()), **dict(network.named_buffers())}
            for method in self.classifiers:
                found = method.classify(shown_task(self.task, method.task_free), model, x)
                if found is not None:
                    return found
        return network.answers(x, (self.client,))

    def train(self, mode: bool = True) -> Answer:
        """Set the mode of the network. Frozen parts keep theirs, because the run's network shares them."""
        self.training = mode
        self.network.train(mode)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The network's state dict, and each frozen part's under ``<part>.<name>``."""
        own = dict(self.network.state_dict())
        for part, module in self.frozen.items():
            own |= {f"{part}.{name}": tensor for name, tensor in module.state_dict().items()}
        return own


@torch.no_grad()
def answer_of(client: Client, choice: Choice) -> Answer:
    """The chosen model, in evaluation mode and without gradients; the federation does not change.

    Weights that are computed from parts become plain weights. If a method permutes features, the weights are in the
    order of the chosen task. Weights are float32, whatever ``trainer.precision`` the run's tests had.

    Args:
        client: the module with its federation, restored from a checkpoint.
        choice: client and task of the model.

    Raises:
        ConfigError: there is no such client or task; models differ by client or task and none was named; a client or
            task was named and makes no difference; or the function that tests compute cannot be exported.
    """
    federation = client.require_federation()
    _check_client(federation, choice.client)
    _check_statistics(federation, choice.client)
    classifiers = list(federation.methods.with_capability(Predictor).values())
    by_task = _differs_by_task(federation)
    if by_task is None and classifiers:
        by_task = _classifies_by_task(client, choice.client, classifiers)
    _check_task(federation, choice, by_task)
    return _answer(client, choice, classifiers)


def _answer(client: Client, choice: Choice, classifiers: list[Any]) -> Answer:
    federation, owner = client.require_federation(), choice.client
    model = federation.model.state_tensors() if owner is None else federation.model_of(owner, choice.task)
    stream_task = choice.stream_task(federation.data)
    network = plain_network(federation.network, federation.model_for(stream_task, model))
    if classifiers and set(network.state_dict()) != set(federation.network.state_dict()):
        names = ", ".join(name for name, method in federation.methods.items() if method in classifiers)
        raise ConfigError("methods", names, "one that leaves the scores to the network, to export decomposed weights")
    answer = Answer(network, classifiers, stream_task, owner or 0)
    answer.train(False).requires_grad_(False)
    return answer


def plain_network(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a network on the CPU, with other values of all its parameters and buffers, given by name.

    Layers with parametrizations, such as decomposed weights, get the weights that they compute, as plain parameters.
    """
    copied = deepcopy(network)
    for name, held in (*copied.named_parameters(), *copied.named_buffers()):
        held.data = tensors[name].detach().to(held.device, held.dtype).clone()
    for module in list(copied.modules()):
        if not parametrize.is_parametrized(module):
            continue
        computed = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
        # Not torch's own removal, which deletes the attribute from the class shared by copy and original.
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module.parametrizations
        for name, weight in computed.items():
            module.register_parameter(name, nn.Parameter(weight))
    return copied.cpu()


def _differs_by_task(federation: Federation) -> str | None:
    """Return the name of a method that gives tasks different models, or None."""
    server = federation.model.state_tensors()
    for name, method in federation.methods.with_capability(TaskModel).items():
        for task in range(federation.data.stream.num_tasks):
            encoded = method.model_for(shown_task(task, method.task_free), server)
            if not all(torch.equal(encoded[key], tensor) for key, tensor in server.items()):
                return name
    return None


def _classifies_by_task(client: Client, owner: int | None, classifiers: list[Any]) -> str | None:
    """Return the name of a method whose scores depend on the task, or None.

    This is found by scoring the same input for every task, since a method may ignore the task.
    """
    federation = client.require_federation()
    answer = _answer(client, Choice(owner), classifiers)
    some = next(answer.network.parameters())
    x = torch.linspace(-1, 1, 2 * torch.Size(federation.data.input_shape).numel(), dtype=some.dtype)
    x = x.view(2, *federation.data.input_shape)
    expected = answer(x)
    for task in range(federation.data.stream.num_tasks):
        answer.task = task
        if not torch.equal(answer(x), expected):
            return next(name for name, method in federation.methods.items() if method in classifiers)
    return None


def _check_client(federation: Federation, client: int | None) -> None:
    clients = federation.data.num_clients
    if client is None:
        if federation.model.has_personal_models:
            own = sorted({name.split(".")[0] for name in federation.model.personal})
            shown = ", ".join(own[:5]) + (", ..." if len(own) > 5 else "")
            raise ConfigError("client", None, f"0..{clients - 1}: clients keep weights to themselves, of {shown}")
        if densities_differ(federation.network):
            raise ConfigError("client", None, f"0..{clients - 1}: clients' masks differ")
        return
    if not federation.model.personal and not densities_differ(federation.network):
        raise ConfigError("client", client, "unset: the clients of this run have nothing but the global model")
    if not 0 <= client < clients:
        raise ConfigError("client", client, f"0..{clients - 1}")


def _check_task(federation: Federation, choice: Choice, by_task: str | None) -> None:
    recalled = choice.client is not None and federation.methods.tells_tasks_apart
    tasks = choice.tasks(federation.data)
    if choice.task is None:
        if by_task is not None:
            raise ConfigError("task", None, f"0..{tasks[-1]}: with methods.{by_task} the model depends on it")
    elif by_task is None and not recalled:
        raise ConfigError("task", choice.task, "unset: this run has one model for all tasks")
    elif choice.task not in tasks:
        raise ConfigError("task", choice.task, f"0..{tasks[-1]}")


def _check_statistics(federation: Federation, client: int | None) -> None:
    layers = [m for m in federation.network.modules() if isinstance(m, _BatchNorm)]
    held = federation.model.batchnorm == "average" or (federation.model.batchnorm == "local" and client is not None)
    if (held or not federation.model.training_norms) and all(layer.running_mean is not None for layer in layers):
        return
    valid = "average: without statistics of its own the model's answer would depend on what else is in the batch"
    if federation.model.batchnorm == "local":
        valid += f"; or --client 0..{federation.data.num_clients - 1}, with that client's"
    raise ConfigError("federated.batchnorm", federation.model.batchnorm, valid)
