"""One data set with a different rotation for each task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.streams.base import Stream, check_number_of_tasks, refuse_boxes
from cfl.data.types import Task
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers


def rotation_map(height: int, width: int, degrees: float) -> Tensor:
    """Nearest-neighbour rotation about the image centre as a pixel map.

    Rotating an image whose pixel values are their own positions tells where each output pixel comes from, so the
    map agrees exactly with Pillow's rotation (which torchvision uses for PIL images), rounding included.

    Args:
        height: pixels.
        width: pixels.
        degrees: counter-clockwise.

    Returns:
        ``[height * width]`` int64: output pixel to input pixel, ``-1`` where the output is outside the input.
    """
    positions = np.arange(1, height * width + 1, dtype=np.int32).reshape(height, width)  # 0 is Pillow's fill value
    rotated = np.asarray(Image.fromarray(positions).rotate(degrees, resample=Image.Resampling.NEAREST))
    return torch.from_numpy(rotated.astype(np.int64).ravel() - 1)


class Rotated(Stream):
    """Rotated tasks: the same images and labels, one fixed rotation per task, angles uniform.

    The tasks share the source's tensors; only their transforms differ. Pixels from outside the image are black.
    Source: rotated MNIST of Fed-A-GEM (Dai et al., 2024), angles from U(0, 180) for every task including the first.

    Args:
        source: the data set, of images.
        num_tasks: number of tasks, at least 1.
        max_degrees: angles are drawn from U(0, max_degrees), counter-clockwise; above 0, at most 360.
        first_is_identity: whether task 0 is left unrotated.

    Raises:
        ConfigError: ``data.stream.num_tasks`` below 1, ``data.stream.max_degrees`` outside (0, 360], a data set of
            boxes or of rows of numbers.
    """

    shared_labels = True

    def __init__(
        self, source: Source, num_tasks: int = 10, max_degrees: float = 180.0, first_is_identity: bool = False
    ) -> None:
        check_number_of_tasks(num_tasks)
        refuse_boxes(source, "Rotated")
        if source.holds_rows:
            valid = "Permuted, or a data set of images"
            raise ConfigError("data.stream", f"Rotated of {source.name}, whose samples are rows of numbers", valid)
        check_numbers("data.stream", "(0, 360]", max_degrees=max_degrees)
        self.source, self.num_tasks = source, num_tasks
        self.max_degrees, self.first_is_identity = max_degrees, first_is_identity
        self.name = f"rotated-{source.name}"
        self.classes_per_task = [source.num_classes] * num_tasks
        self.shape = source.shape

    def angle(self, task: int, seed: int) -> float:
        """Rotation of one task in degrees, counter-clockwise."""
        if task == 0 and self.first_is_identity:
            return 0.0
        return float(numpy_generator(seed, "rotation", task).uniform(0.0, self.max_degrees))

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; every task refers to the same two ImageSets."""
        train, test = load_checked(self.source, root)
        _, height, width = self.shape
        tasks = []
        for t in range(self.num_tasks):
            transform, degrees = self.source.transform(), self.angle(t, seed)
            if degrees != 0.0:
                transform = transform.with_pixel_map(rotation_map(height, width, degrees))
            tasks.append(Task(f"rotation {t}", train, test, self.source.num_classes, transform))
        return tasks
