"""Several data sets, each cut into tasks of a few classes."""

from __future__ import annotations

from pathlib import Path

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.sources.split import balanced_subset
from cfl.data.streams.base import Stream, require_classes
from cfl.data.streams.class_split import select_classes
from cfl.data.streams.same_numbers import check_same_numbers, number_of_each
from cfl.data.streams.sequence import check_columns, common_shape, enlarge, repeat_channels
from cfl.data.types import Task
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers


class Mixture(Stream):
    """Tasks of ``classes_per_task`` classes from several data sets, all tasks of one data set before the next.

    Images are brought to a common size and number of channels as in :class:`cfl.data.streams.sequence.Sequence`; each
    source keeps its own normalisation. Within a source the classes are shuffled once for all runs (``class_seed``),
    then cut into groups; classes that do not fill a group are not used. A task's name is the source's with the group's
    number, as in NonIID-50 of FedWeIT (Yoon et al., 2021), appendix B. FedWeIT's shuffles came from another generator.

    Args:
        sources: the data sets.
        tasks_per_source: number of tasks to keep of each source, the first ones; null: as many as its classes give.
        classes_per_task: classes in each task.
        class_seed: keys the shuffles; independent of the run's seed, so that tasks are the same in all runs.
        max_train: keep at most this many training samples of each task, class-balanced, the same ones in every run;
            null: all. Meant for data sets of very different sizes.

    Raises:
        ConfigError: no sources, one that has too few classes, fewer samples than classes, or numbers of channels that
            cannot be reconciled.
    """

    shared_labels = False

    def __init__(
        self,
        sources: list[Source],
        tasks_per_source: list[int] | None = None,
        classes_per_task: int = 5,
        class_seed: int = 777,
        max_train: int | None = None,
    ) -> None:
        self.shape = common_shape(sources)
        for source in sources:
            require_classes(source, "Mixture")
        check_integers("data.stream", 1, classes_per_task=classes_per_task)
        if max_train is not None and max_train < classes_per_task:
            valid = f"at least {classes_per_task}, one sample of each class of a task, or null"
            raise ConfigError("data.stream.max_train", max_train, valid)
        fewest = min(sources, key=lambda source: source.num_classes)
        if fewest.num_classes < classes_per_task:
            valid = f"at most {fewest.num_classes}, the classes of {fewest.name}"
            raise ConfigError("data.stream.classes_per_task", classes_per_task, valid)
        most = [source.num_classes // classes_per_task for source in sources]
        kept = most if tasks_per_source is None else tasks_per_source
        if len(kept) != len(sources) or any(not 1 <= k <= m for k, m in zip(kept, most, strict=True)):
            limits = ", ".join(f"{source.name} 1..{m}" for source, m in zip(sources, most, strict=True))
            raise ConfigError("data.stream.tasks_per_source", kept, f"one number for each source: {limits}")
        self.sources, self.tasks_per_source, self.class_seed = sources, list(kept), class_seed
        self.max_train = max_train
        self.num_tasks = sum(kept)
        self.classes_per_task = [classes_per_task] * self.num_tasks
        self.name = f"mixture-{len(sources)}x{self.num_tasks}"

    def source_of(self, task: int) -> Source:
        """See :meth:`Stream.source_of`."""
        pairs = zip(self.sources, self.tasks_per_source, strict=True)
        return [source for source, kept in pairs for _ in range(kept)][task]

    def _groups(self, number: int) -> list[list[int]]:
        """The classes of each of a source's tasks."""
        order = numpy_generator(self.class_seed, "mixture", number).permutation(self.sources[number].num_classes)
        kept, size = self.tasks_per_source[number], self.classes_per_task[0]
        return order[: kept * size].reshape(kept, size).tolist()

    def class_names(self, root: Path, seed: int) -> list[tuple[str, ...]]:
        """See :meth:`Stream.class_names`; each name begins with that of its data set."""
        found = []
        for number, source in enumerate(self.sources):
            names = source.names(root)
            found += [tuple(f"{source.name} {names[label]}" for label in group) for group in self._groups(number)]
        return found

    def check_numbers(self, root: Path, shared_outputs: bool) -> None:
        """See :meth:`Stream.check_numbers`; classes are numbered by the shuffles."""
        if shared_outputs:
            groups = [
                (source, number_of_each(tuple(names[label] for label in group)))
                for number, source in enumerate(self.sources)
                for names in [source.names(root)]
                for group in self._groups(number)
            ]
            valid = "data sets without common classes, or data.scenario: task, where tasks share no outputs"
            check_same_numbers("class", [source for source, _ in groups], [own for _, own in groups], valid)
        check_columns(self.sources, self.shape[2], root, shared_outputs)

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; nothing depends on the run's seed."""
        tasks: list[Task] = []
        size = self.classes_per_task[0]
        for number, source in enumerate(self.sources):
            train, test = (enlarge(part, self.shape) for part in load_checked(source, root, "data.stream.sources"))
            transform = repeat_channels(source.transform(), self.shape[0])
            for group, own in enumerate(self._groups(number)):
                own_train, own_test = (select_classes(part, own, source.num_classes) for part in (train, test))
                name = f"{source.name}_{group}"
                if self.max_train is not None and self.max_train < len(own_train):
                    own_train = own_train.subset(balanced_subset(own_train.labels, self.max_train, f"mixture {name}"))
                tasks.append(Task(name, own_train, own_test, size, transform))
        return tasks
