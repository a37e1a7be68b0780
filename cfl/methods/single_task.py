"""Single-task training: the accuracy that each task reaches alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.channel import payload_bytes
from cfl.federation.task_states import TaskStates
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import crosses_tasks, keeps_state
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError


class SingleTask(Method):
    """Trains every task from the initial model, as if it were the only one (FOT, Table 11).

    With one global model the figure to read is ``acc_single_task``, the mean of the accuracy matrix's diagonal. ACC,
    FGT and BWT of such a run have no meaning.

    If models are personal (``PersonalLayers``), a client begins a task in the first round of the task in which it is
    sampled. Its personal parameters are then stored for its last task and reset. Images of earlier tasks are tested
    with the parameters stored for them. With ``["*"]`` every client thus has a model per task, and nothing is
    forgotten. This is STL of FedWeIT (Yoon et al., 2021, Table 1). The figure to read is then ACC, and the size,
    ``model_bytes``, grows by a model per task.

    BatchNorm's running statistics that clients keep (``federated.batchnorm: local``) are reset only if models are
    personal, because no test of a global model uses them.

    Methods that begin a task with what they have kept of the last one, such as SCAFFOLD and FedCurv, are refused beside
    it. An adaptive bound of DPFedAvg goes on from task to task.

    Sends nothing of its own. Storage per client: its personal parameters, once per learned task. Scenarios: task-,
    class- and domain-incremental. Optimizers: any.

    Raises:
        ConfigError: before training, what :meth:`setup` refuses.
    """

    looks_back: ClassVar[bool] = True
    state = ("_initial",)

    def setup(self, context: Context) -> None:
        """Store the initial model.

        Raises:
            ConfigError: if there are two of these methods, which would share their clients' state, or another method
                uses something of earlier tasks.
        """
        super().setup(context)
        self.refuse_twins(SingleTask, "one SingleTask")
        others = {name: method for name, method in context.methods.items() if not isinstance(method, SingleTask)}
        if backward := [name for name, method in others.items() if method.looks_back or crosses_tasks(method)]:
            raise ConfigError("methods", backward, "no method that looks back at earlier tasks beside SingleTask")
        if kept := [name for name, method in others.items() if keeps_state(method)]:
            valid = "no method that begins a task with what it has kept of the last one beside SingleTask"
            raise ConfigError("methods", kept, valid)
        self._initial = {name: tensor.detach().clone() for name, tensor in context.shared_tensors().items()}
        self._initial |= {name: context.state_tensors()[name].detach().clone() for name in context.personal}
        self._tasks = TaskStates(context.clients, "single task")

    def begin_task(self, plan: RoundPlan) -> None:
        """Reset the global model to the initial one, and the server's momentum."""
        if plan.task == 0:
            return
        self.context.forget_momentum()
        with torch.no_grad():
            for name, tensor in self.context.shared_tensors().items():
                tensor.copy_(self._initial[name])

    @torch.no_grad()
    def start_clients(self, cohort: Cohort) -> None:
        """Let clients begin the task from the initial values, and store the personal parameters of their last task."""
        context = self.context
        if not context.has_personal_models:
            return
        latest = self._tasks.latest(cohort.clients)
        beginners = [position for position, task in enumerate(latest) if task != cohort.task]
        experienced = [position for position in beginners if latest[position] >= 0]
        if experienced:
            own = context.personal_state(tuple(cohort.clients[position] for position in experienced))
            clients = [cohort.clients[position] for position in experienced]
            self._tasks.store(clients, [latest[position] for position in experienced], own)
        for position in beginners:
            cohort.begin_with(position, {name: self._initial[name] for name in context.personal})

    @torch.no_grad()
    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Store that clients have begun the task."""
        if self.context.has_personal_models:
            self._tasks.begin([cohort.clients[position] for position in positions], cohort.task)

    def recall(self, client: int, task: int | None, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model with the personal parameters stored for the task."""
        if task is None or not self.context.has_personal_models:
            return model
        stored = self._tasks.stored(client, task) or {}
        return {**model, **{name: value.to(model[name].device) for name, value in stored.items() if name in model}}

    def client_storage(self) -> int:
        """Bytes of the personal parameters, once per stored task."""
        context = self.context
        tensors = context.state_tensors()
        own = payload_bytes({name: tensors[name] for name in context.personal})
        begun = 8 * bool(context.clients.holders("single task task"))
        return begun + own * max(self._tasks.counts(context.num_tasks).values(), default=0)

    def report(self) -> Report:
        """Mean accuracy on each task directly after it was trained, in percent; if all models are personal,
        ``model_bytes`` of all clients' models of all tasks."""
        context = self.context
        diagonal = context.accuracy.compute().diagonal(dim1=-2, dim2=-1)
        value = diagonal.nanmean().item()
        found = {"acc_single_task": None if math.isnan(value) else value}
        if context.has_personal_models and not context.shared_parameters:
            present, counts = context.clients.holders("model"), self._tasks.counts(context.num_tasks)
            one = payload_bytes(dict(context.network.named_parameters()))
            found["model_bytes"] = one * (len(present) + counts.total())
        return Report(found)
