"""USPS, from either of two file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cfl.data.sources.array_files import read_npz
from cfl.data.sources.files import refuse_damaged
from cfl.data.sources.vision import TorchvisionSource
from cfl.data.types import ImageSet


class USPS(TorchvisionSource):
    """Postal digits, 7,291 + 2,007 of 16x16 (Hull 1994).

    Files: ``<root>/usps.bz2`` and ``<root>/usps.t.bz2``, torchvision's layout, or else ``<root>/usps.npz`` with
    train_images, train_labels, test_images and test_labels: uint8 ``[N, 16, 16]`` and integers 0..9. Default
    normalisation: that of the training pixels.
    """

    name = "usps"
    title = "USPS"
    shape = (1, 16, 16)
    num_classes = 10
    mean = (0.2539,)
    std = (0.3842,)
    published = (7_291, 2_007)
    hint = (
        "Or give usps.npz in that folder: train_images and test_images, uint8 [N, 16, 16], "
        "train_labels and test_labels, 0..9."
    )

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set: from torchvision's files if both exist, else from the ``.npz``, else downloaded."""
        files = self._files(root)
        if (root / "usps.npz").is_file() and not all(file.path.is_file() for file in files):
            return read_npz(root / "usps.npz")
        refuse_damaged(self.title, files)  # torchvision compares no md5 where the file exists
        return super().read(root)

    def _samples(self, dataset: Any) -> ImageSet:
        return ImageSet(
            torch.from_numpy(np.ascontiguousarray(dataset.data[:, None])),
            torch.tensor(dataset.targets, dtype=torch.int64),
        )
