"""The base class of streams that move the pixels of one data set."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.streams.base import Stream, check_number_of_tasks, refuse_boxes
from cfl.data.types import Task


class PixelMapStream(Stream):
    """Tasks with the same images and labels, and one fixed map of the pixels per task.

    The tasks share the source's tensors; only their transforms differ.

    Args:
        source: the data set.
        num_tasks: number of tasks, at least 1.
        first_is_identity: whether task 0 keeps the images as they are.

    Attributes:
        move: what a map does, in the tasks' names.
        moved: the same in the stream's name.

    Raises:
        ConfigError: ``data.stream.num_tasks`` below 1, or a data set of boxes.
    """

    shared_labels = True
    move: ClassVar[str]
    moved: ClassVar[str]

    def __init__(self, source: Source, num_tasks: int, first_is_identity: bool) -> None:
        check_number_of_tasks(num_tasks)
        refuse_boxes(source, type(self).__name__)
        self.source, self.num_tasks, self.first_is_identity = source, num_tasks, first_is_identity
        self.name = f"{self.moved}-{source.name}"
        self.classes_per_task = [source.num_classes] * num_tasks
        self.shape = source.shape

    @abstractmethod
    def pixel_map(self, task: int, seed: int) -> Tensor | None:
        """Pixel map of one task, ``[H * W]`` int64 (output pixel to input pixel, -1 for black), None for none."""

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; every task refers to the same two ImageSets."""
        train, test = load_checked(self.source, root)
        tasks = []
        for t in range(self.num_tasks):
            transform, pixel_map = self.source.transform(), self.pixel_map(t, seed)
            if pixel_map is not None:
                transform = transform.with_pixel_map(pixel_map)
            tasks.append(Task(f"{self.move} {t}", train, test, self.source.num_classes, transform))
        return tasks
