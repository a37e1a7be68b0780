"""The handwritten digits that are part of scikit-learn: real data without a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cfl.data.sources.split import SHARES, stratified_split
from cfl.data.sources.standard import KEY, StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.option_checks import check_numbers


class Digits(StandardSource):
    """1,797 handwritten digits of 8x8, values 0..16 (Alpaydin and Kaynak 1998; scikit-learn's ``load_digits``).

    Default normalisation: that of the training pixels at the default ``test_share``.

    Args:
        test_share: share of the samples that becomes the test set, between 0.01 and 0.99; stratified, and the
            same in every run.
        options: those of :class:`StandardSource`.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "digits"
    shape = (1, 8, 8)
    num_classes = 10
    mean = (0.3054,)
    std = (0.3761,)
    scale = 16.0

    def __init__(self, test_share: float = 0.2, **options: Any) -> None:
        check_numbers(KEY, SHARES, test_share=test_share)
        self.test_share = test_share
        super().__init__(**options)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set; ``root`` is not used."""
        stored = torch.from_numpy(_stored())
        images, labels = stored[:, :-1].to(torch.uint8), stored[:, -1].to(torch.int64)
        return stratified_split(self.name, ImageSet(images.reshape(-1, *self.shape), labels), self.test_share)


def _stored() -> np.ndarray:
    """Pixels and labels, ``[1797, 65]`` float64; if possible without importing scikit-learn, which takes a second."""
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))
