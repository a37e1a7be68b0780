"""One data set with a different pixel permutation for each task."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.streams.base import Stream, check_number_of_tasks, refuse_boxes
from cfl.data.types import Task
from cfl.randomness.generators import numpy_generator


class Permuted(Stream):
    """Permuted tasks: the same images and labels, one fixed permutation of the pixels per task.

    All channels of a pixel move together. The tasks share the source's tensors; only their transforms differ.
    FOT (Bakman et al., ICLR 2024) leaves the first task unpermuted; Fed-A-GEM (Dai et al., 2024) permutes it too.

    Args:
        source: the data set.
        num_tasks: number of tasks, at least 1.
        first_is_identity: whether task 0 keeps the original pixel order.

    Raises:
        ConfigError: ``data.stream.num_tasks`` below 1.
    """

    shared_labels = True

    def __init__(self, source: Source, num_tasks: int = 10, first_is_identity: bool = True) -> None:
        check_number_of_tasks(num_tasks)
        refuse_boxes(source, "Permuted")
        self.source, self.num_tasks, self.first_is_identity = source, num_tasks, first_is_identity
        self.name = f"permuted-{source.name}"
        self.classes_per_task = [source.num_classes] * num_tasks
        self.shape = source.shape

    def pixel_map(self, task: int, seed: int) -> Tensor | None:
        """Pixel map of one task, ``[H * W]`` int64 (output pixel to input pixel), None for the identity."""
        if task == 0 and self.first_is_identity:
            return None
        _, height, width = self.shape
        return torch.from_numpy(numpy_generator(seed, "permutation", task).permutation(height * width))

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; every task refers to the same two ImageSets."""
        train, test = load_checked(self.source, root)
        tasks = []
        for t in range(self.num_tasks):
            transform, pixel_map = self.source.transform(), self.pixel_map(t, seed)
            if pixel_map is not None:
                transform = transform.with_pixel_map(pixel_map)
            tasks.append(Task(f"permutation {t}", train, test, self.source.num_classes, transform))
        return tasks
