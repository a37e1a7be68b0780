"""Checks that a stream's class announces valid sizes, and that its tasks have these sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cfl.data.sources.loading import check_announced, failure, flaw_of_samples, flaw_of_transform
from cfl.data.streams.base import Stream
from cfl.data.streams.common_clients import with_common_clients
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
    for source in {stream.source_of(task): None for task in range(tasks)}:
        if source is not None:
            check_announced(source, "data.stream.source")


def loaded_tasks(stream: Stream, root: Path, seed: int) -> list[Task]:
    """The tasks of a stream, after checking that they are what it announces.

    Args:
        stream: of a class that passes :func:`check_stream`.
        root: folder with the data sets' files.
        seed: the run's seed.

    Raises:
        ConfigError: ``data.stream``, naming the first task that differs.
    """
    try:
        tasks = stream.tasks(root, seed)
    except Exception as error:
        raise _refused(stream, f"whose tasks fail ({failure(error, stream)})", "one for each task") from error
    if not isinstance(tasks, Sequence) or not all(isinstance(task, Task) for task in tasks):
        raise _refused(stream, "whose tasks are no list of cfl.data.types.Task", "one for each task")
    if len(tasks) != stream.num_tasks:
        raise _refused(stream, f"which gives {len(tasks)} tasks", f"{stream.num_tasks}, as num_tasks says")
    passed: set[tuple[int, int, int]] = set()  # tasks may share samples, which are checked once
    for number, (task, classes) in enumerate(zip(tasks, stream.classes_per_task, strict=True)):
        for part, samples in (("train", task.train), ("test", task.test)):
            if not isinstance(samples, ImageSet):
                found = f"whose {part} is {type(samples).__name__} in task {number}"
                raise _refused(stream, found, "a cfl.data.types.ImageSet")
        if task.num_classes != classes:
            found = f"whose num_classes is {task.num_classes} in task {number}"
            raise _refused(stream, found, f"{classes}, as classes_per_task says")
        kind = id(task.train), id(task.test), classes
        flaw = kind not in passed and flaw_of_samples(task.train, task.test, stream.shape, stream.targets, classes)
        flaw = flaw or flaw_of_transform(task.transform, task.train.images)
        if flaw:
            again = "; labels count from 0 in every task" if "labels run" in flaw.found else ""
            raise _refused(stream, f"{flaw.found} in task {number}", f"{flaw.valid}{again}")
        passed.add(kind)
    return with_common_clients(tasks)


def _counts(values: object) -> int | None:
    """Number of ``values``, if all are integers of at least 1; else None."""
    if not isinstance(values, Sequence) or not all(type(value) is int and value >= 1 for value in values):
        return None
    return len(values)


def _refused(stream: Stream, found: str, valid: str) -> ConfigError:
    return ConfigError("data.stream", f"{type(stream).__name__}, {found}", valid)
