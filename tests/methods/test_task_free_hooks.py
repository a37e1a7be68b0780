"""A task-free method gets no tasks from the arguments of its hooks or from its context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import double, fit, mlp, permuted, sgd, split, tiny_client, tiny_data
from torch import Tensor, nn

from cfl.data.participation import Joining
from cfl.data.samples import Samples
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import TaskHandle, TaskHidden, unwrap_task
from cfl.export.answer import Choice, answer_of
from cfl.methods import Method
from cfl.metrics.measure import ACCURACY
from cfl.runtime.errors import ConfigError


class Sees(Method):
    """Records the tasks that it is told. Subclasses add the hooks."""

    def __init__(self, free: bool) -> None:
        self.task_free = free
        self.told: list[Any] = []


def _looks_at(samples: Samples, logits: Tensor) -> Tensor:
    """A very large loss if samples show their tasks."""
    return (samples.tasks == -1).all().logical_not() * 1e6 + 0 * logits.sum()


class InTerm(Sees):
    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        return _looks_at(samples, logits)


class InWeights(Sees):
    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        return weights + 1e-4 * _looks_at(samples, logits)


class InWholeLoss(Sees):
    def local_loss(self, network: nn.Module, x: Tensor, samples: Samples) -> Tensor:
        logits = network(x)
        return (samples.weights * ACCURACY.losses(logits, samples.y, samples.allowed, None)).sum() + _looks_at(
            samples, logits
        )


class InPass(Sees):
    passes_forward = True

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        logits = network(x)
        return logits, _looks_at(samples, logits)


@pytest.mark.parametrize("kind", [InTerm, InWeights, InWholeLoss, InPass])
def test_losses_see_no_tasks(kind: type[Sees]) -> None:
    losses = []
    for free in (True, False):
        data = tiny_data(split(2))
        client = tiny_client(data, methods={"sees": kind(free)})
        fit(client, data)
        losses.append(client.mean_loss)
    assert losses[0] < 100 < losses[1]


class InModels(Sees):
    """Records the task wherever a model is put together or tested."""

    def model_for(self, task: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
        self.told.append(task)
        return model

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        self.told.append(task)
        return model

    def classify(self, task: int, model: dict[str, Tensor], x: Tensor) -> Tensor | None:
        self.told.append(task)
        return None

    def keeps_local(self, name: str) -> bool:
        return name.startswith("head.")


@pytest.mark.parametrize("free", [True, False])
def test_models_are_made_for_a_task_that_is_not_named(free: bool) -> None:
    method, data = InModels(free), tiny_data(permuted(2))
    client = tiny_client(data, methods={"sees": method})
    federation = fit(client, data)
    in_fit = len(method.told)
    federation.methods.model_for(1, {})
    federation.model_of(0, 1)
    federation.model_of(0, None)
    answer_of(client, Choice(0))(torch.zeros(1, 1, 4, 4))
    assert in_fit > 50
    assert any(task is None for task in method.told)
    told = [task for task in method.told if task is not None]
    assert {type(task) for task in told} == {TaskHandle if free else int}
    assert {unwrap_task(task) for task in told} == {0, 1}
    assert client.methods.tells_tasks_apart is not free
    if free:
        with pytest.raises(ConfigError, match=r"^task = 1 .*one model for all tasks"):
            answer_of(client, Choice(0, 1))
    else:
        answer_of(client, Choice(0, 1))


@pytest.mark.parametrize("exposure", ["sequential", "cumulative", "asynchronous"])
def test_what_a_client_trains_on_is_in_no_order_of_tasks(exposure: Any) -> None:
    # 26 or 27 samples of each task, so that a client's third portion of ten is of two tasks.
    data = tiny_data(permuted(3), exposure=exposure, num_clients=3, portion=10 if exposure == "asynchronous" else None)
    method = Sees(True)
    fit(tiny_client(data, methods={"sees": method}), data)
    several = unsorted = 0
    for task in range(3):
        for client in range(3):
            found = method.context.global_index_trained_on(TaskHandle(task), client)  # type: ignore[arg-type]
            places = data.global_index_trained_on(task, client)
            assert found.tolist() == sorted(data.handles.of(places).tolist())
            tasks = data.global_index.tasks(data.handles.global_index(torch.from_numpy(found)))
            several += len(tasks.unique()) > 1
            unsorted += bool((tasks.diff() < 0).any())
    assert several == unsorted == {"sequential": 0, "cumulative": 6, "asynchronous": 3}[exposure]


def test_batches_of_a_portion_are_what_a_client_trains_on() -> None:
    """Batches are in the order of handles and have each sample once."""
    data = tiny_data(permuted(3), exposure="asynchronous", num_clients=3, portion=10)
    method = Sees(True)
    fit(tiny_client(data, methods={"sees": method}), data)
    context = method.context
    for task in range(3):
        for client in range(3):
            address: Any = TaskHandle(task)
            batches = list(context.client_batches(address, client, 7, torch.device("cpu")))
            assert max(len(y) for _, y in batches) == 7
            handles = torch.from_numpy(context.global_index_trained_on(address, client))
            x, y, _ = context.samples_at(handles)
            assert torch.equal(torch.cat([part for part, _ in batches]), x)
            assert torch.equal(torch.cat([part for _, part in batches]), y)


class Ahead(Sees):
    """Asks for the round that is ``ahead`` rounds after the one that ends."""

    def __init__(self, free: bool, ahead: int) -> None:
        super().__init__(free)
        self.ahead = ahead

    def end_round(self, plan: RoundPlan) -> None:
        context = self.context
        number = min(plan.round + self.ahead, context.num_rounds - 1)
        self.told.append(len(context.plan(number).clients))
        assert len(context.present(number)) == self.told[-1]
        context.task_at(number, 0)


def test_who_takes_part_in_later_rounds_is_not_shown() -> None:
    def run(free: bool, ahead: int) -> list[Any]:
        method = Ahead(free, ahead)
        data = tiny_data(participation=Joining(2, 2), schedule={"rounds_per_task": 2})
        fit(tiny_client(data, double(mlp), sgd, {"ahead": method}), data)
        return method.told

    assert run(True, 0) == [2, 2, 4, 4]
    assert run(True, 1) == [2, 4, 4, 4]
    assert run(False, 2) == [4, 4, 4, 4]
    with pytest.raises((TaskHidden, RuntimeError), match=r"round 2 of the schedule, behind round 1, .* is hidden"):
        run(True, 2)


@pytest.mark.parametrize("ask", ["plan", "present", "task_at"])
def test_nothing_of_later_rounds_is_shown(ask: str) -> None:
    data = tiny_data(permuted(2))
    method = Sees(True)
    federation = fit(tiny_client(data, methods={"sees": method}), data)
    federation.round = 2
    more = (0,) if ask == "task_at" else ()
    getattr(method.context, ask)(2, *more)
    with pytest.raises(TaskHidden, match="round 3 of the schedule"):
        getattr(method.context, ask)(3, *more)
