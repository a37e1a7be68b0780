"""Find boxes in images that are not in the run's data sets, with the run's detector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cfl.export.prediction import SampleScorer
from cfl.export.reading import read_images
from cfl.runtime.errors import ConfigError
from cfl.training.found_boxes import SURE


class Box(NamedTuple):
    """A box in an image; an image in which nothing was found gives one box without a class.

    Attributes:
        image: the file; for an array, with the row.
        label: name of the class; empty if nothing was found.
        score: score of the box; None if nothing was found.
        corners: left, top, right and bottom in pixels of the image as the run reads it; empty if nothing was found.
    """

    image: str
    label: str
    score: float | None
    corners: tuple[float, ...]


@torch.no_grad()
def boxes_found(scorer: SampleScorer, places: Sequence[Path], top: int | None) -> Iterator[Box]:
    """The boxes in images, best first, a file at a time.

    Args:
        scorer: the model of the run.
        places: as for :func:`cfl.export.reading.read_images`.
        top: how many boxes of an image, whatever their score; None for those with a score of at least 0.3.

    Raises:
        ConfigError: the client does not exist, it or the task is missing, or the detector's outputs for an image are
            not finite.
        cfl.runtime.errors.DataFilesMissing: names a file that cannot be used.
    """
    root, source = scorer.federation.data.root, scorer.source()
    model, names = scorer.model_of_client(), source.names(root)
    for files, stored in read_images(places, source, root):
        answers = model(scorer.network_input(stored)).cpu()
        for file, found in zip(files, answers, strict=True):
            if not bool(found.isfinite().all()):
                raise ConfigError(
                    "FILE", file, "images as in training: the detector's outputs for this one are not finite"
                )
            found = found[found[:, 0] >= 0]
            kept = found[found[:, 5] >= SURE] if top is None else found[:top]
            if not len(kept):
                yield Box(file, "", None, ())
            for label, *corners, score in kept.tolist():
                yield Box(file, names[int(label)], score, tuple(corners))
