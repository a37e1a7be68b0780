"""The handwritten digits that are part of scikit-learn: real data without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cfl.data.sources.split import SHARES, stratified_split
from cfl.data.sources.standard import KEY, StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.option_checks import check_numbers


class Digits(StandardSource):
    """1,797 handwritten digits of 8x8, values 0..16 (Alpaydin and Kaynak 1998; scikit-learn's ``load_digits``).

    Args:
        test_share: share of the samples that becomes the test set, between 0.01 and 0.99; stratified, and the
            same in every run.
        mean: subtracted per channel, in units of ``stored / 16``; null: that of the training pixels at the
            default ``test_share``.
        std: divided by per channel, in the same units, positive; null: likewise.
        max_train: keep at most this many training samples, class-balanced, at least one of each; null: all.
        max_test: likewise for the test set.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "digits"
    shape = (1, 8, 8)
    num_classes = 10
    mean = (0.3054,)
    std = (0.3761,)
    scale = 16.0

    def __init__(
        self,
        test_share: float = 0.2,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        max_train: int | None = None,
        max_test: int | None = None,
    ) -> None:
        check_numbers(KEY, SHARES, test_share=test_share)
        self.test_share = test_share
        super().__init__(mean, std, max_train, max_test)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Both sets; ``root`` is not used."""
        from sklearn.datasets import load_digits  # slow to import

        stored = load_digits()
        images = torch.from_numpy(stored.images.astype(np.uint8)).unsqueeze(1)
        whole = ImageSet(images, torch.from_numpy(stored.target.astype(np.int64)))
        return stratified_split(self.name, whole, self.test_share)
