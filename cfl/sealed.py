"""What methods that need not know a task are shown of it: something to hand on, nothing to look at.

General continual learning has no task ids and no boundaries at training time. A method that declares so
(``Method.task_free``) gets rounds, cohorts and batches whose ``task`` is a :class:`SealedTask`: functions that
address a client's current data or map a model into its coordinates take it, arithmetic and comparisons fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from cfl.cohort import Cohort
    from cfl.schedule import RoundPlan


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
