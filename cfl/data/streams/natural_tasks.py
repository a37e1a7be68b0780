"""Tasks that the data set itself tells."""

from __future__ import annotations

from pathlib import Path

from cfl.data.sources.base import Source
from cfl.data.sources.loading import check_announced, load_checked
from cfl.data.sources.root import data_root
from cfl.data.streams.base import Stream, check_number_of_tasks
from cfl.data.types import ImageSet, Task
from cfl.runtime.errors import ConfigError, DataFilesMissing


class NaturalTasks(Stream):
    """Every sample belongs to the task that the data set says, such as the year of a row of a table.

    All tasks have all classes of the data set, and clients and features mean the same in every task.

    Args:
        source: the data set, ``CsvTable`` with its option ``task``.

    Raises:
        ConfigError: ``data.stream.source`` that does not say of which task its samples are.
    """

    shared_labels = True

    def __init__(self, source: Source) -> None:
        check_announced(source, "data.stream.source")
        names = source.task_names(data_root())
        if not names:
            valid = "one that says of which task each sample is: CsvTable with its option task"
            raise ConfigError("data.stream.source", source.name, valid)
        check_number_of_tasks(len(names))
        self.source, self.num_tasks, self.shape = source, len(names), source.shape
        self.name = f"natural-{source.name}"
        self.classes_per_task = [source.num_classes] * len(names)

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; nothing here is drawn at random."""
        parts = load_checked(self.source, root)
        tasks = []
        for number, name in enumerate(self.source.task_names(root)):
            train, test = (_of_task(part, number) for part in parts)
            if not len(train) or not len(test):
                what = "test sample" if len(train) else "training sample"
                raise DataFilesMissing(f"{self.source.name}: task {name!r} has no {what}; each task needs one")
            title = f"{self.source.name} {name}"
            tasks.append(Task(title, train, test, self.source.num_classes, self.source.transform()))
        return tasks


def _of_task(samples: ImageSet, number: int) -> ImageSet:
    assert samples.tasks is not None, "a source with names of tasks says of which task each sample is"
    return samples.subset((samples.tasks == number).nonzero().squeeze(1))
