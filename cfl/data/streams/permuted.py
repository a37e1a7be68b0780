"""One data set with a different pixel permutation for each task."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.streams.pixel_maps import PixelMapStream
from cfl.randomness.generators import numpy_generator


class Permuted(PixelMapStream):
    """Permuted tasks: the same images and labels, one fixed permutation of the pixels per task.

    All channels of a pixel move together.
    The code of FOT (Bakman et al., ICLR 2024) leaves the first task unpermuted; Fed-A-GEM (Dai et al., 2024) permutes
    it too.

    Args:
        source: the data set.
        num_tasks: number of tasks, at least 1.
        first_is_identity: whether task 0 keeps the original pixel order.

    Raises:
        ConfigError: ``data.stream.num_tasks`` below 1.
    """

    move, moved = "permutation", "permuted"

    def __init__(self, source: Source, num_tasks: int = 10, first_is_identity: bool = True) -> None:
        super().__init__(source, num_tasks, first_is_identity)

    def pixel_map(self, task: int, seed: int) -> Tensor | None:
        """See :meth:`PixelMapStream.pixel_map`."""
        if task == 0 and self.first_is_identity:
            return None
        _, height, width = self.shape
        return torch.from_numpy(numpy_generator(seed, "permutation", task).permutation(height * width))
