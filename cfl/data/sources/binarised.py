"""Binarised images: pixels become black or white by a threshold or at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.split import merged_split
from cfl.data.sources.standard import KEY
from cfl.data.types import ImageSet
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_choices

_NEITHER = 2
"""Part number of images outside the training set (0) and the test set (1)."""


class Binarised(Source):
    """Another source's images in black and white: 1 above a threshold and 0 elsewhere, or drawn at random.

    Network input is 0 or 1, whatever the source's normalisation. CONFEDMADE (Paul et al., 2023) takes MNIST above 127.
    The binarised MNIST on which densities are usually compared was drawn once, with value / white as the probability of
    a 1 (Salakhutdinov and Murray, 2008). ``BinarySet`` reads that draw; ``drawn`` makes another one.

    Args:
        source: the data set.
        threshold: largest stored value that becomes 0; null takes half of the value of white (127.5 of 255).
        split: the ``source``'s own training and test set, or both ``merged`` and cut anew, with 5/7 of each class for
            training and 1/7 for tests, as CONFEDMADE does; the rest is not used. The cut is the same in every run.
        drawn: a pixel is 1 with the probability value / white, drawn once, the same in every run.

    Raises:
        ConfigError: a threshold that would make all pixels equal or is given with ``drawn``, or another split.
    """

    def __init__(
        self,
        source: Source,
        threshold: float | None = None,
        split: Literal["source", "merged"] = "source",
        drawn: bool = False,
    ) -> None:
        if drawn and threshold is not None:
            raise ConfigError(f"{KEY}.threshold", threshold, "null with drawn")
        if threshold is not None and not 0 <= threshold < source.scale:
            raise ConfigError(f"{KEY}.threshold", threshold, f"at least 0 and below {source.scale:g}, or null")
        check_choices(KEY, ("source", "merged"), split=split)
        self.source, self.split, self.drawn = source, split, drawn
        self.threshold = source.scale / 2 if threshold is None else threshold
        self.name = f"{'drawn' if drawn else 'binary'}-{source.name}"
        self.shape, self.num_classes = source.shape, source.num_classes
        self.mean, self.std, self.scale = (0.0,) * self.shape[0], (1.0,) * self.shape[0], 1.0
        self.superclasses, self.class_names, self.targets = source.superclasses, source.class_names, source.targets

    @property
    def unlike_published(self) -> str:  # type: ignore[override]
        """As for ``source``."""
        return self.source.unlike_published

    def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """See :meth:`Source.load`; stored values are 0 and 1."""
        train, test = (
            replace(part, images=self._bits(part.images, number)) for number, part in enumerate(self.source.load(root))
        )
        return merged_split([train, test], f"split {self.source.name}") if self.split == "merged" else (train, test)

    def names(self, root: Path) -> tuple[str, ...]:
        """As for ``source``."""
        return self.source.names(root)

    def columns(self, root: Path) -> tuple[str, ...]:
        """As for ``source``."""
        return self.source.columns(root)

    def task_names(self, root: Path) -> tuple[str, ...]:
        """As for ``source``."""
        return self.source.task_names(root)

    @property
    def reads(self) -> str:
        """As for ``source``, and how pixels become black or white."""
        how = "with the probability value / white" if self.drawn else f"above {self.threshold:g}"
        return f"{self.source.reads} A stored value is 1 {how}, else 0.".strip()

    def image_of_file(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.image_of_file`."""
        return self._bits(self.source.image_of_file(path, root)[None], _NEITHER)[0]

    def images_of_array(self, stored: NDArray[Any], root: Path) -> Tensor:
        """See :meth:`Source.images_of_array`; the array is one of ``source``."""
        return self._bits(self.source.images_of_array(stored, root), _NEITHER)

    def images_of_table(self, path: Path, root: Path) -> Tensor:
        """See :meth:`Source.images_of_table`."""
        return self._bits(self.source.images_of_table(path, root), _NEITHER)

    def _bits(self, images: Tensor, part: int) -> Tensor:
        if not self.drawn:
            return (images > self.threshold).to(torch.uint8)
        generator = torch_generator(0, f"binarise {self.source.name}", part)
        bits = torch.empty(images.shape, dtype=torch.uint8)
        for one, other in zip(bits.split(10_000), images.split(10_000), strict=True):  # random floats take 4 bytes each
            one.copy_(torch.rand(other.shape, generator=generator) * self.source.scale < other)
        return bits
