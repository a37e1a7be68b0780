"""What methods that need not know a task are shown of it: something to hand on, nothing to look at.

General continual learning has no task ids and no boundaries at training time. A method that declares so
(``Method.task_free``) gets rounds, cohorts and batches whose ``task`` is a :class:`SealedTask`: functions that
address a client's current data or map a model into its coordinates take it, arithmetic and comparisons fail. The
federation that it is set up with does not say where tasks begin and end, and a buffer's samples come with
:class:`SealedTasks`. What a loss is taken over stays open to it: a client that computes one knows its outputs, which
differ from task to task only where the scenario or ``data.class_loss`` tells clients so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor

if TYPE_CHECKING:
    from cfl.cohort import Cohort
    from cfl.data.datamodule import FederatedDataModule
    from cfl.federation import Federation
    from cfl.schedule import BoundSchedule, RoundPlan


class TaskHidden(RuntimeError):
    """A method that declares to need no task has asked for one."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is hidden from a method that declares to need neither task ids nor boundaries")


class SealedTask:
    """Stands for a task.

    Every handing out makes a new one, so that not even identity tells two tasks apart.
    """

    __slots__ = ("_task",)

    def __init__(self, task: int) -> None:
        self._task = task

    def _hidden(self, *_: Any) -> NoReturn:
        raise TaskHidden("which task it is")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _hidden
    __hash__ = __int__ = __index__ = __bool__ = _hidden

    def __repr__(self) -> str:
        return "a task"


TaskRef = int | SealedTask
"""A task, or what stands for one."""


def opened(task: TaskRef) -> int:
    """The task's number; for functions that act on a method's behalf."""
    return task._task if isinstance(task, SealedTask) else task


class SealedTasks:
    """Stands for the tasks of samples, one each."""

    __slots__ = ("_tasks",)

    def __init__(self, tasks: Tensor) -> None:
        self._tasks = tasks

    def _hidden(self, *_: Any) -> NoReturn:
        raise TaskHidden("the tasks of samples")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __getattr__ = _hidden
    __hash__ = __getitem__ = __iter__ = __len__ = __bool__ = __int__ = __index__ = _hidden

    def __repr__(self) -> str:
        return "tasks of samples"


def opened_tasks(tasks: Tensor | SealedTasks) -> Tensor:
    """The tasks of samples, int64; for functions that act on a method's behalf."""
    return tasks._tasks if isinstance(tasks, SealedTasks) else tasks


class SealedPlan:
    """A round without what says where its task begins and ends; see :class:`cfl.schedule.RoundPlan`.

    Attributes:
        round: from 0, over all tasks.
        clients: the sampled clients' ids, ascending.
    """

    def __init__(self, plan: RoundPlan) -> None:
        self.round, self.clients = plan.round, plan.clients
        self._task = plan.task

    @property
    def task(self) -> SealedTask:
        """Stands for the round's task."""
        return SealedTask(self._task)

    def __getattr__(self, name: str) -> NoReturn:
        raise TaskHidden(f"{name} of a round")


class SealedCohort:
    """A cohort, its task hidden; all else is the cohort's own."""

    _HIDDEN = frozenset({"train_outputs", "outputs_in_loss"})

    def __init__(self, cohort: Cohort) -> None:
        self._cohort = cohort

    @property
    def task(self) -> SealedTask:
        """Stands for the task that the clients train."""
        return SealedTask(self._cohort.task)

    def __getattr__(self, name: str) -> Any:
        if name in self._HIDDEN:
            raise TaskHidden(f"{name} of a cohort")
        return getattr(self._cohort, name)


def sealed_plan(plan: RoundPlan) -> RoundPlan:
    """What a method is shown of a round."""
    return cast("RoundPlan", SealedPlan(plan))


def sealed_cohort(cohort: Cohort) -> Cohort:
    """What a method is shown of a cohort."""
    return cast("Cohort", SealedCohort(cohort))


class SealedSchedule:
    """Which rounds there are, and whose; not what they train."""

    def __init__(self, schedule: BoundSchedule) -> None:
        self._schedule = schedule

    @property
    def num_rounds(self) -> int:
        """Over all tasks."""
        return self._schedule.num_rounds

    def round(self, number: int) -> SealedPlan:
        """A round, sealed."""
        return SealedPlan(self._schedule.round(number))

    def __getattr__(self, name: str) -> NoReturn:
        raise TaskHidden(f"{name} of the schedule")


class _Sealed:
    """What it stands in front of, but for some names."""

    _HIDDEN: frozenset[str]

    def __init__(self, hidden_in: object) -> None:
        self._hidden_in = hidden_in

    def __getattr__(self, name: str) -> Any:
        if name in self._HIDDEN:
            raise TaskHidden(name)
        if name == "_hidden_in":  # a copy that is being made has nothing yet
            raise AttributeError(name)
        return getattr(self._hidden_in, name)


class SealedSettings(_Sealed):
    """The schedule's settings without the tasks' lengths."""

    _HIDDEN = frozenset({"rounds_per_task"})


class SealedData(_Sealed):
    """The data module, which finds samples by a client's sealed task or by their places; not whose task's they are."""

    _WHERE_CLIENTS_ARE = frozenset({"rounds", "next_round", "order", "stream_task"})
    _WHOSE_SAMPLES_ARE = frozenset({"places", "tasks", "indices", "dealt", "trained_on", "trained_in"})
    _HIDDEN = _WHERE_CLIENTS_ARE | _WHOSE_SAMPLES_ARE

    def __init__(self, data: FederatedDataModule) -> None:
        super().__init__(data)
        self.schedule = SealedSettings(data.schedule)


class SealedFederation(_Sealed):
    """The federation, without what says which task clients are at."""

    _HIDDEN = frozenset({"last_task", "rows_due"})

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.data = SealedData(federation.data)
        self.schedule = SealedSchedule(federation.schedule)


def sealed_federation(federation: Federation) -> Federation:
    """What a method is set up with."""
    return cast("Federation", SealedFederation(federation))
