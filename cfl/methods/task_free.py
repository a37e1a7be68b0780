"""Rounds, cohorts and contexts for methods that need neither task ids nor boundaries (``Method.task_free``).

General continual learning has neither at training time. In rounds, cohorts and batches, ``task`` is an opaque handle
(:class:`cfl.data.task_handles.TaskHandle`): functions that look up a client's current data take it, arithmetic and
comparisons fail. Samples have handles too, also in a step's ``index``, and tasks of replayed samples are hidden. The
context shows the names listed here and looks up samples by handles only.

This keeps a method from using a task by mistake; it is no sandbox. A test checks that no number depends on tasks:
training with scrambled task ids changes nothing. The outputs in a client's loss stay visible. They differ from task to
task only if the scenario or ``data.class_loss`` lets clients know the outputs of their task.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from cfl.data.exposure import Handles
from cfl.data.schedule import RoundPlan
from cfl.data.task_handles import TaskHandle, TaskHandles, TaskHidden, only_handle
from cfl.engines.cohort import Cohort
from cfl.methods.context import Context


class _View:
    """Shows some names of an object. Reading any other name, or setting one, raises TaskHidden."""

    _SHOWN: ClassVar[frozenset[str]]
    _WHOSE: ClassVar[str]

    def __init__(self, behind: Any) -> None:
        object.__setattr__(self, "_behind", behind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # requested by Python itself, e.g. while an object is copied and still empty
            raise AttributeError(name)
        if name not in self._SHOWN:
            raise TaskHidden(f"{name} of {self._WHOSE}")
        return getattr(self._behind, name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TaskHidden(f"setting {name} of {self._WHOSE}")


class TaskFreePlan(_View):
    """A :class:`cfl.data.schedule.RoundPlan` that hides its task and where the task begins and ends."""

    _SHOWN = frozenset({"round", "clients"})
    _WHOSE = "a round"

    @property
    def task(self) -> TaskHandle:
        """A handle of the round's task."""
        return TaskHandle(self._behind.task)


class TaskFreeCohort(_View):
    """A cohort that hides its task."""

    _WHO = frozenset({"clients", "sizes", "round", "steps", "lr", "network"})
    _TENSORS = frozenset({"parameters", "buffers", "global_parameters", "own", "gradients", "used_outputs"})
    _SHOWN = _WHO | _TENSORS | frozenset({"gradients_on", "use_outputs", "used_rows", "rows"})
    _WHOSE = "a cohort"

    @property
    def task(self) -> TaskHandle:
        """A handle of the task that the clients train."""
        return TaskHandle(self._behind.task)


class TaskFreeContext(_View):
    """A context that hides which task clients are at.

    Samples are looked up by a task handle or by their own handles (:class:`cfl.data.exposure.Handles`). Global indices
    are hidden because they increase from task to task; handles do not. Later rounds are hidden because clients may join
    or leave with a task.

    Args:
        behind: the :class:`cfl.methods.context.Context`.
    """

    _MODEL = frozenset({"network", "device", "batchnorm", "shared_parameters", "shared_buffers", "personal", "frozen"})
    _TENSORS = frozenset({"state_tensors", "personal_state", "shared_tensors", "evaluation_statistics"})
    _ROUNDS = frozenset({"round", "finished", "num_rounds", "local_epochs", "batch_size", "eval_batch_size"})
    _SETTINGS = frozenset(
        {
            "seed",
            "scenario",
            "class_loss",
            "client_weighting",
            "measure",
            "exposure",
            "num_clients",
            "has_personal_models",
            "optimizer",
        }
    )
    _SHAPES = frozenset({"input_shape", "num_outputs", "most_trained_on"})
    _SHOWN = (
        _MODEL
        | _TENSORS
        | _ROUNDS
        | _SETTINGS
        | _SHAPES
        | frozenset({"everyones", "at_server", "methods", "clients", "channel", "buffer"})
    )
    _WHOSE = "the context"
    # Functions that take a task, and its position among their arguments.
    _TASK_AT: ClassVar[dict[str, int]] = {
        "members": 0,
        "own_clients": 0,
        "client_batches": 0,
        "outputs_in_loss": 0,
        "outputs_in_loss_of": 1,
    }

    # Rounds so far, and between rounds the next one.

    def _begun(self, number: int) -> int:
        latest = self._behind.round
        if number > latest:
            raise TaskHidden(f"round {number} of the schedule, behind round {latest}, which is as far as one may look,")
        return number

    def plan(self, round: int) -> TaskFreePlan:
        """The plan of a round, with its task hidden."""
        return TaskFreePlan(self._behind.plan(self._begun(round)))

    def present(self, round: int) -> np.ndarray:
        """As :meth:`cfl.methods.context.Context.present`."""
        present: np.ndarray = self._behind.present(self._begun(round))
        return present

    def expected_clients(self, round: int) -> float:
        """As :meth:`cfl.methods.context.Context.expected_clients`."""
        expected: float = self._behind.expected_clients(self._begun(round))
        return expected

    def task_at(self, round: int, client: int) -> TaskHandle:
        """A handle of the task that a client is at in a round."""
        return TaskHandle(self._behind.task_at(self._begun(round), client))

    def __getattr__(self, name: str) -> Any:
        if name not in self._TASK_AT:
            return super().__getattr__(name)
        found, at = getattr(self._behind, name), self._TASK_AT[name]

        def of_handle(*given: Any) -> Any:
            only_handle(given[at])
            return found(*given)

        return of_handle

    # Samples by handles.

    def global_index_trained_on(self, task: TaskHandle, client: int) -> np.ndarray:
        """Ascending handles of the samples that a client trains on during a task. They are not in the order of global
        indices, which would sort a portion's samples (``data.exposure: asynchronous``) by task."""
        return np.sort(self._handles.of(self._behind.global_index_trained_on(only_handle(task), client)))

    @property
    def _handles(self) -> Handles:
        handles: Handles = self._behind._data.handles
        return handles

    def samples_at(
        self, handles: Tensor, moment: tuple[int, int] | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor, TaskHandles]:
        """As :meth:`cfl.methods.context.Context.samples_at`, by handles."""
        samples: tuple[Tensor, Tensor, TaskHandles] = self._behind.samples_at(
            self._handles.global_index(handles), moment, device
        )
        return samples

    def labels_at(self, handles: Tensor) -> Tensor:
        """As :meth:`cfl.methods.context.Context.labels_at`, by handles."""
        labels: Tensor = self._behind.labels_at(self._handles.global_index(handles))
        return labels


def task_free_plan(plan: RoundPlan) -> RoundPlan:
    """Hide the task of a round's plan."""
    return cast(RoundPlan, TaskFreePlan(plan))


def task_free_cohort(cohort: Cohort) -> Cohort:
    """Hide the task of a cohort."""
    return cast(Cohort, TaskFreeCohort(cohort))


def task_free_context(context: Context) -> Context:
    """Hide the tasks of a context."""
    return cast(Context, TaskFreeContext(context))
