"""The base class of task streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from cfl.data.named import Named
from cfl.data.sources.base import Source
from cfl.data.sources.loading import check_announced
from cfl.data.types import Task
from cfl.metrics.base import Targets
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory
from cfl.runtime.option_checks import check_integers


def check_number_of_tasks(num_tasks: int) -> None:
    """Refuse a number of tasks below 1, or so many that their accuracy matrix does not fit into memory.

    Raises:
        ConfigError: ``data.stream.num_tasks``.
    """
    check_integers("data.stream", 1, num_tasks=num_tasks)
    require_memory(
        "data.stream.num_tasks", num_tasks, 8 * num_tasks**2, "fewer tasks, with a matrix of their accuracies"
    )


def require_classes(source: Source, stream: str) -> None:
    """Refuse a data set whose labels are not classes, for a stream that divides classes among tasks.

    Raises:
        ConfigError: ``data.stream``, or ``data.stream.source`` whose class announces something invalid.
    """
    check_announced(source, "data.stream.source")
    if source.targets != "classes":
        valid = "one that keeps all samples together, such as Sequence: there are no classes to divide"
        raise ConfigError("data.stream", f"{stream} of {source.name}, whose labels are {source.targets}", valid)


def refuse_boxes(source: Source, stream: str) -> None:
    """Refuse a data set of boxes, for a stream that moves pixels.

    Raises:
        ConfigError: ``data.stream``, or ``data.stream.source`` whose class announces something invalid.
    """
    check_announced(source, "data.stream.source")
    if source.targets == "boxes":
        valid = "one that leaves images as they are, such as Sequence: boxes would not move with their pixels"
        raise ConfigError("data.stream", f"{stream} of {source.name}, whose labels are boxes", valid)


class Stream(Named, ABC):
    """A sequence of tasks. Everything except :meth:`tasks` is known without reading a file.

    Attributes:
        name: short lower-case name for reports and run names, e.g. ``permuted-digits``; by default the class's name.
        num_tasks: number of tasks.
        classes_per_task: number of classes of each task, ``num_tasks`` entries.
        shape: ``(C, H, W)`` of the network's input, the same for every task.
        shared_labels: True when class ``k`` means the same thing in every task (domain-incremental streams).
    """

    num_tasks: int
    classes_per_task: list[int]
    shape: tuple[int, int, int]
    shared_labels: bool

    @abstractmethod
    def tasks(self, root: Path, seed: int) -> list[Task]:
        """The tasks in order, labels local to each task (``0 .. classes_per_task[t] - 1``).

        Args:
            root: folder with the data sets' files.
            seed: the run's seed; every draw is keyed by it and the task's number.

        Raises:
            cfl.runtime.errors.DataFilesMissing: when a source's files are absent.
        """

    def source_of(self, task: int) -> Source | None:
        """The data set of a task; None if unknown."""
        found = getattr(self, "source", None)
        return found if isinstance(found, Source) else None

    def class_names(self, root: Path, seed: int) -> list[tuple[str, ...]]:
        """Per task, the names of its classes in the order of its labels; numbers where there are none.

        Args:
            root: folder with the data sets' files, which may have names; it need not exist.
            seed: the run's seed.
        """
        source = self.source_of(0) if self.shared_labels else None
        if source is not None:
            return [source.names(root)] * self.num_tasks
        return [tuple(map(str, range(classes))) for classes in self.classes_per_task]

    def check_numbers(self, root: Path, shared_outputs: bool) -> None:
        """Refuse data sets that number the same features, or where tasks share outputs the same classes, differently.

        Args:
            root: folder with the data sets' files.
            shared_outputs: whether tasks share outputs.

        Raises:
            ConfigError: ``data.stream.sources``.
        """

    @property
    def targets(self) -> Targets:
        """The kind of the labels (:attr:`cfl.data.sources.base.Source.targets`).

        Raises:
            ConfigError: ``data.stream``: not the same in all tasks.
        """
        sources = [source for task in range(self.num_tasks) if (source := self.source_of(task)) is not None]
        found = {source.targets for source in sources} or {"classes"}
        if len(found) > 1:
            value = [f"{source.name}: {source.targets}" for source in sources]
            raise ConfigError("data.stream", value, "sources whose labels are all of one kind")
        return found.pop()

    @property
    def unlike_published(self) -> list[str]:
        """Differences of the loaded data sets from the published ones, a line for each."""
        held = [part for value in vars(self).values() for part in (value if isinstance(value, list) else [value])]
        said = dict.fromkeys(part.unlike_published for part in held if isinstance(part, Source))
        return [line for line in said if line]
