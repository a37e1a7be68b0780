"""Checks that a stream's class announces valid sizes, and that its tasks have these sizes."""

from __future__ import annotations

from collections.abc import Sequence

from cfl.data.streams.base import Stream
from cfl.data.types import ImageSet, Task
from cfl.runtime.errors import ConfigError


def check_stream(stream: Stream) -> None:
    """Refuse a stream with missing or invalid ``num_tasks``, ``shape``, classes or ``shared_labels``; read no file.

    Raises:
        ConfigError: ``data.stream``.
    """
    tasks, shape, classes = (getattr(stream, name, None) for name in ("num_tasks", "shape", "classes_per_task"))
    if not isinstance(tasks, int) or tasks < 1:
        raise _refused(stream, f"whose num_tasks is {tasks}", "an integer of at least 1")
    if _counts(shape) != 3:
        raise _refused(stream, f"whose shape is {shape}", "(C, H, W), three integers of at least 1")
    if (count := _counts(classes)) is None:
        raise _refused(stream, f"whose classes_per_task is {classes}", "a list of integers of at least 1")
    if count != tasks:
        raise _refused(stream, f"with {count} classes_per_task and {tasks} tasks", "one for each task")
    if not isinstance(getattr(stream, "shared_labels", None), bool):
        raise _refused(stream, "without shared_labels", "true where a class means the same in every task, or false")


def check_tasks(stream: Stream, tasks: object) -> None:
    """Refuse tasks that are not what their stream announces.

    Args:
        stream: of a class that passes :func:`check_stream`.
        tasks: what its ``tasks`` has returned.

    Raises:
        ConfigError: ``data.stream``, naming the first task that differs.
    """
    if not isinstance(tasks, Sequence) or not all(isinstance(task, Task) for task in tasks):
        raise _refused(stream, "whose tasks are no list of cfl.data.types.Task", "one for each task")
    if len(tasks) != stream.num_tasks:
        raise _refused(stream, f"which gives {len(tasks)} tasks", f"{stream.num_tasks}, as num_tasks says")
    for number, (task, classes) in enumerate(zip(tasks, stream.classes_per_task, strict=True)):
        for part, samples in (("training", task.train), ("test", task.test)):
            if flaw := _flaw(stream, samples, classes):
                found, valid = flaw
                raise _refused(stream, f"whose {part} {found} in task {number}", valid)


def _flaw(stream: Stream, samples: ImageSet, classes: int) -> tuple[str, str] | None:
    """What is wrong with a task's samples, and what would be valid; None if nothing is wrong."""
    shape = tuple(samples.images.shape[1:])
    if shape != tuple(stream.shape):
        return f"images have the shape {list(shape)}", f"the announced {list(stream.shape)}"
    if stream.targets == "classes" and samples.labels.ndim == 1 and len(samples):
        lowest, highest = int(samples.labels.min()), int(samples.labels.max())
        if lowest < 0 or highest >= classes:
            found = f"labels run from {lowest} to {highest}"
            return found, f"0 to {classes - 1}, as classes_per_task says; labels count from 0 in every task"
    return None


def _counts(values: object) -> int | None:
    """Number of ``values``, if all are integers of at least 1; else None."""
    if not isinstance(values, Sequence) or not all(type(value) is int and value >= 1 for value in values):
        return None
    return len(values)


def _refused(stream: Stream, found: str, valid: str) -> ConfigError:
    return ConfigError("data.stream", f"{type(stream).__name__}, {found}", valid)
