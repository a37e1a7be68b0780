"""One data set cut into tasks by class."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.streams.base import Stream, check_number_of_tasks, require_classes
from cfl.data.types import ImageSet, Task
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices


class ClassSplit(Stream):
    """Makes tasks of disjoint groups of classes, each relabelled from 0.

    FOT (Bakman et al., ICLR 2024) and the code of Fed-A-GEM (Dai et al., 2024) take the classes in natural order.

    Args:
        source: the data set.
        num_tasks: number of tasks; without ``classes_per_task`` it must divide the source's number of classes.
        classes_per_task: number of classes in each task, or a list with one number per task, such as
            ``[50, 10, 10, 10, 10, 10]`` for a large first task. Classes that are left over are not used. None gives
            every task an equal share of all classes. The attribute of this name holds the list, in the order of the
            tasks.
        class_order: ``natural`` takes the classes as the source numbers them; ``seeded`` shuffles them with the
            run's seed first; ``superclass`` makes a task of each of the data set's own groups of classes, as
            Overlapped-CIFAR-100 (FedWeIT) does with CIFAR-100's 20.
        task_order: order of the tasks: ``given`` by the order of the classes; ``seeded`` shuffles the tasks with the
            run's seed, which needs tasks of one size; or a list of all tasks, from 0. The classes of a task stay
            together.

    Raises:
        ConfigError: ``data.stream.num_tasks``, ``data.stream.classes_per_task`` or ``data.stream.class_order`` when
            the source's classes cannot be split that way; ``data.stream.task_order`` that is no order of the tasks.
    """

    shared_labels = False

    def __init__(
        self,
        source: Source,
        num_tasks: int = 10,
        classes_per_task: int | list[int] | None = None,
        class_order: Literal["natural", "seeded", "superclass"] = "natural",
        task_order: Literal["given", "seeded"] | list[int] = "given",
    ) -> None:
        check_number_of_tasks(num_tasks)
        require_classes(source, "ClassSplit")
        check_choices("data.stream", ("natural", "seeded", "superclass"), class_order=class_order)
        if task_order not in ("given", "seeded") and (
            isinstance(task_order, str) or sorted(task_order) != list(range(num_tasks))
        ):
            valid = f"given, seeded or a list of the tasks 0 to {num_tasks - 1}, each once"
            raise ConfigError("data.stream.task_order", task_order, valid)
        if class_order == "superclass":
            sizes = [_superclass_size(source, num_tasks, classes_per_task)] * num_tasks
        else:
            sizes = _classes_in_each_task(source, num_tasks, classes_per_task)
        if task_order == "seeded" and len({*sizes}) > 1:
            raise ConfigError("data.stream.task_order", task_order, "given or a list, with tasks of different sizes")
        self.source, self.num_tasks, self.class_order, self.task_order = source, num_tasks, class_order, task_order
        self.name = f"split-{source.name}"
        self._sizes = sizes
        self.classes_per_task = [sizes[task] for task in task_order] if isinstance(task_order, list) else sizes
        self.shape = source.shape

    def class_groups(self, seed: int) -> list[list[int]]:
        """The source's classes of each task: ``class_groups(seed)[t][k]`` is label ``k`` of task ``t``."""
        groups = self._groups_as_given(seed)
        if isinstance(self.task_order, list):
            return [groups[task] for task in self.task_order]
        if self.task_order == "seeded":
            return [groups[task] for task in numpy_generator(seed, "task_order").permutation(self.num_tasks)]
        return groups

    def _groups_as_given(self, seed: int) -> list[list[int]]:
        if self.class_order == "superclass":
            return [list(group) for group in self.source.superclasses[: self.num_tasks]]
        order = np.arange(self.source.num_classes)
        if self.class_order == "seeded":
            order = numpy_generator(seed, "class_order").permutation(order)
        ends = accumulate(self._sizes)
        return [order[end - size : end].tolist() for end, size in zip(ends, self._sizes, strict=True)]

    def class_names(self, root: Path, seed: int) -> list[tuple[str, ...]]:
        """See :meth:`Stream.class_names`."""
        names = self.source.names(root)
        return [tuple(names[label] for label in group) for group in self.class_groups(seed)]

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; each task holds copies of its own samples."""
        train, test = load_checked(self.source, root)
        return [
            Task(
                self._task_name(t, group),
                select_classes(train, group, self.source.num_classes),
                select_classes(test, group, self.source.num_classes),
                len(group),
                self.source.transform(),
            )
            for t, group in enumerate(self.class_groups(seed))
        ]

    def _task_name(self, task: int, group: list[int]) -> str:
        if "seeded" in (self.class_order, self.task_order):  # tables average over seeds, so names do not depend on them
            return f"{self.source.name} split {task}"
        if self.class_order == "superclass":
            number = self.task_order[task] if isinstance(self.task_order, list) else task
            return f"{self.source.name} superclass {number}"
        if len(group) == 1:
            return f"{self.source.name} class {group[0]}"
        return f"{self.source.name} classes {group[0]}-{group[-1]}"


def _classes_in_each_task(source: Source, num_tasks: int, classes_per_task: int | list[int] | None) -> list[int]:
    available, key = source.num_classes, "data.stream.classes_per_task"
    if classes_per_task is None:
        if available % num_tasks:
            # Only divisors up to 1000, so that the message stays readable.
            divisors = ", ".join(str(d) for d in range(1, min(available, 1000) + 1) if available % d == 0)
            raise ConfigError(
                "data.stream.num_tasks",
                num_tasks,
                f"a divisor of the {available} classes of {source.name} ({divisors}), or set {key}",
            )
        return [available // num_tasks] * num_tasks
    if isinstance(classes_per_task, list):
        if {*map(type, classes_per_task)} != {int} or min(classes_per_task) < 1 or sum(classes_per_task) > available:
            valid = f"integers from 1 with a sum of at most {available}, the number of classes of {source.name}"
            raise ConfigError(key, classes_per_task, valid)
        if len(classes_per_task) != num_tasks:
            valid = f"{len(classes_per_task)}, as many as {key} has numbers"
            raise ConfigError("data.stream.num_tasks", num_tasks, valid)
        return list(classes_per_task)
    if type(classes_per_task) is not int or not 1 <= classes_per_task <= available:
        valid = f"an integer between 1 and {available}, the number of classes of {source.name}"
        raise ConfigError(key, classes_per_task, valid)
    if num_tasks * classes_per_task > available:
        raise ConfigError(
            "data.stream.num_tasks",
            num_tasks,
            f"at most {available // classes_per_task} tasks of {classes_per_task} classes out of the {available} "
            f"classes of {source.name}",
        )
    return [classes_per_task] * num_tasks


def _superclass_size(source: Source, num_tasks: int, classes_per_task: int | list[int] | None) -> int:
    grouped = [label for group in source.superclasses for label in group]
    if len({*grouped}) < len(grouped) or not {*grouped} <= {*range(source.num_classes)}:
        found = f"{type(source).__name__}, whose superclasses hold {grouped}"
        raise ConfigError("data.stream.source", found, f"each of 0 to {source.num_classes - 1} at most once")
    sizes = {len(group) for group in source.superclasses}
    if len(sizes) != 1:
        raise ConfigError(
            "data.stream.class_order", "superclass", f"natural or seeded: {source.name} has no superclasses"
        )
    if num_tasks > len(source.superclasses):
        raise ConfigError("data.stream.num_tasks", num_tasks, f"at most {len(source.superclasses)} superclasses")
    if classes_per_task not in (None, *sizes):
        raise ConfigError(
            "data.stream.classes_per_task", classes_per_task, f"null or {sizes.pop()}, a superclass's size"
        )
    return sizes.pop()


def select_classes(images: ImageSet, group: list[int], num_classes: int) -> ImageSet:
    """The samples of some of ``num_classes`` classes, copied, relabelled by the place of their class in ``group``."""
    local = torch.full((num_classes,), -1)
    local[torch.tensor(group)] = torch.arange(len(group))
    labels = local[images.labels]
    index = (labels >= 0).nonzero().squeeze(1)
    return replace(images.subset(index), labels=labels[index])
