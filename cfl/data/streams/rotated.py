"""One data set with a different rotation for each task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.streams.pixel_maps import PixelMapStream
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


class Rotated(PixelMapStream):
    """Rotated tasks: the same images and labels, one fixed rotation per task, angles uniform.

    Pixels from outside the image are black.
    Source: rotated MNIST of Fed-A-GEM (Dai et al., 2024), which rotates the first task, too. The range of
    angles is that of its code.

    Args:
        source: the data set, of images.
        num_tasks: number of tasks, at least 1.
        max_degrees: angles are drawn from U(0, max_degrees), counter-clockwise; above 0, at most 360.
        first_is_identity: whether task 0 is left unrotated.
        angles: one angle per task in degrees, the same with every seed, instead of drawn ones.

    Raises:
        ConfigError: ``data.stream.num_tasks`` below 1, ``data.stream.max_degrees`` outside (0, 360], other than
            ``num_tasks`` angles or one that is not finite, a data set of boxes or of rows of numbers.
    """

    move, moved = "rotation", "rotated"

    def __init__(
        self,
        source: Source,
        num_tasks: int = 10,
        max_degrees: float = 180.0,
        first_is_identity: bool = False,
        angles: Sequence[float] | None = None,
    ) -> None:
        super().__init__(source, num_tasks, first_is_identity)
        if source.holds_rows:
            valid = "Permuted, or a data set of images"
            raise ConfigError("data.stream", f"Rotated of {source.name}, whose samples are rows of numbers", valid)
        check_numbers("data.stream", "(0, 360]", max_degrees=max_degrees)
        if angles is not None and (len(angles) != num_tasks or not np.isfinite(angles).all()):
            raise ConfigError("data.stream.angles", list(angles), f"num_tasks = {num_tasks} finite numbers, or null")
        self.max_degrees, self.angles = max_degrees, angles

    def angle(self, task: int, seed: int) -> float:
        """Rotation of one task in degrees, counter-clockwise."""
        if task == 0 and self.first_is_identity:
            return 0.0
        if self.angles is not None:
            return float(self.angles[task])
        return float(numpy_generator(seed, "rotation", task).uniform(0.0, self.max_degrees))

    def pixel_map(self, task: int, seed: int) -> Tensor | None:
        """See :meth:`PixelMapStream.pixel_map`."""
        degrees = self.angle(task, seed)
        return rotation_map(self.shape[1], self.shape[2], degrees) if degrees != 0.0 else None
