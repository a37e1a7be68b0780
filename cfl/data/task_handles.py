"""Opaque task handles for methods that must not use task ids.

A handle is passed on to functions that look up a client's current data. Comparing it, computing with it or printing
its number fails with :class:`TaskHidden`. See :mod:`cfl.methods.task_free` for what else such methods see.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, cast

from torch import Tensor


class TaskHidden(RuntimeError):
    """Raised when a method that declares to need no task uses a task."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is hidden from a method that declares to need neither task ids nor boundaries")


class _Token:
    """An opaque object that can only be passed on: comparing it or computing with it fails."""

    __slots__ = ()
    _WHAT: ClassVar[str]

    def _hidden(self, *_: Any) -> NoReturn:
        raise TaskHidden(self._WHAT)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _hidden
    __hash__ = __int__ = __index__ = __bool__ = _hidden


class TaskHandle(_Token):
    """An opaque handle of a task.

    A new object is made each time, so that object identity does not tell tasks apart either.
    """

    __slots__ = ("_task",)
    _WHAT = "which task it is"

    def __init__(self, task: int) -> None:
        self._task = task

    def __repr__(self) -> str:
        return "a task"


TaskRef = int | TaskHandle
"""A task's number, or its handle."""


def unwrap_task(task: TaskRef) -> int:
    """The task's number; for functions that act on a method's behalf."""
    return task._task if isinstance(task, TaskHandle) else task


def shown_task(task: int, task_free: bool) -> int:
    """A task as a method is shown it: its number, or a handle for a task-free method."""
    return cast(int, TaskHandle(task)) if task_free else task


def only_handle(task: TaskRef) -> TaskHandle:
    """Return a task's handle; refuse a task's number.

    Raises:
        TaskHidden: it is a number, which a task-free method cannot know.
    """
    if not isinstance(task, TaskHandle):
        raise TaskHidden("what belongs to a task that is named by its number")
    return task


class TaskHandles(_Token):
    """Opaque handles of the tasks of samples, one for each sample."""

    __slots__ = ("_tasks",)
    _WHAT = "the tasks of samples"

    def __init__(self, tasks: Tensor) -> None:
        self._tasks = tasks

    __getitem__ = __iter__ = __len__ = _Token._hidden

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # requested by Python itself, e.g. while copying
            raise AttributeError(name)
        self._hidden()

    def __repr__(self) -> str:
        return "tasks of samples"


def unwrap_tasks(tasks: Tensor | TaskHandles) -> Tensor:
    """The tasks of samples, int64; for functions that act on a method's behalf."""
    return tasks._tasks if isinstance(tasks, TaskHandles) else tasks
