"""Synthetic images for tests and for trying out a set-up: no files, any size, easy to learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cfl.data.sources.standard import KEY, StandardSource, check_shape
from cfl.data.types import ImageSet
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.memory import require_memory
from cfl.runtime.option_checks import check_integers, check_numbers

_DARKEST, _BRIGHTEST = 64, 191  # prototypes keep away from 0 and 255, where noise would be cut off

_BYTES_PER_PIXEL = 24  # prototype, noise and their sum


class Synthetic(StandardSource):
    """A random prototype image per class plus Gaussian noise per pixel; a linear model can learn it.

    Prototype pixels are uniform on 64..191. Classes are equally frequent up to one sample. With few pixels or
    much noise, prototypes come close together and the classes overlap. Default normalisation: 0.5 and 0.25.

    Args:
        num_classes: number of classes, at least 1.
        shape: ``[C, H, W]`` of one image; null: ``[1, 8, 8]``.
        train_size: number of training samples, at least ``num_classes``.
        test_size: number of test samples, at least ``num_classes``.
        noise: standard deviation of the noise, in stored values (0 to 255), not negative.
        seed: of prototypes and noise; another seed is another data set, whatever the run's seed.
        options: those of :class:`StandardSource`.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "synthetic"

    def __init__(
        self,
        num_classes: int = 10,
        shape: list[int] | None = None,
        train_size: int = 1000,
        test_size: int = 200,
        noise: float = 40.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_integers(KEY, 1, num_classes=num_classes)
        for key, size in (("train_size", train_size), ("test_size", test_size)):
            if size < num_classes:
                raise ConfigError(f"{KEY}.{key}", size, f"at least {num_classes}, one sample of each class")
        check_numbers(KEY, "[0, inf)", noise=noise)
        self.shape = (1, 8, 8) if shape is None else check_shape(shape)
        for key, size in (("shape", num_classes), ("train_size", train_size), ("test_size", test_size)):
            value = shape if key == "shape" else size
            require_memory(f"{KEY}.{key}", value, _BYTES_PER_PIXEL * size * math.prod(self.shape), "fewer pixels")
        self.num_classes = num_classes
        self.train_size, self.test_size, self.noise, self.seed = train_size, test_size, noise, seed
        self.mean, self.std = (0.5,) * self.shape[0], (0.25,) * self.shape[0]
        super().__init__(**options)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set; ``root`` is not used."""
        prototypes = numpy_generator(self.seed, "synthetic prototypes").uniform(
            _DARKEST, _BRIGHTEST, (self.num_classes, *self.shape)
        )
        return self._draw(prototypes, self.train_size, "train"), self._draw(prototypes, self.test_size, "test")

    def _draw(self, prototypes: np.ndarray, size: int, part: str) -> ImageSet:
        generator = numpy_generator(self.seed, f"synthetic {part}")
        labels = generator.permutation(np.arange(size) % self.num_classes)
        images = prototypes[labels] + self.noise * generator.standard_normal((size, *self.shape))
        stored = np.clip(np.rint(images), 0, 255).astype(np.uint8)
        return ImageSet(torch.from_numpy(stored), torch.from_numpy(labels.astype(np.int64)))
