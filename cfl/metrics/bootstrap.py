"""Bootstrap of the mean average precision at an overlap of 0.5: how much it varies between test images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cfl.metrics.boxes import iou
from cfl.randomness.generators import numpy_generator

RESAMPLES = 200
OVERLAP = 0.5
"""Least intersection over union at which a box counts as found."""
_RECALLS = np.linspace(0, 1, 101)


def bootstrapped(images: Sequence[tuple[Tensor, Tensor]]) -> np.ndarray:
    """``[RESAMPLES]`` mean average precisions at an overlap of 0.5, from 0 to 1, of images drawn with replacement.

    A value is NaN where no image with a box was drawn. The draws depend on the images alone, not on their order, which
    differs with the number of processes that share them.

    Args:
        images: for each image, the detections ``[n, 6]`` and the true boxes ``[m, 5]``, without padding.
    """
    images = sorted(images, key=lambda pair: (pair[1].numpy().tobytes(), pair[0].numpy().tobytes()))
    count = len(images)
    generator = numpy_generator(0, "bootstrap of test images")
    return mean_precisions(images, generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES))


def mean_precisions(images: Sequence[tuple[Tensor, Tensor]], times: np.ndarray) -> np.ndarray:
    """Return ``[R]`` mean average precisions of R samples of images, in which an image may count several times.

    Args:
        images: as for :func:`bootstrapped`.
        times: ``[R, I]``, how often each of the I images counts.
    """
    classes = sorted({int(label) for _, true in images for label in true[:, 0].tolist()})
    if not classes:
        return np.full(len(times), np.nan)
    of_classes = np.stack([_precisions_of(images, label, times) for label in classes])
    known = ~np.isnan(of_classes)
    total = np.where(known, of_classes, 0.0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _precisions_of(images: Sequence[tuple[Tensor, Tensor]], label: int, times: np.ndarray) -> np.ndarray:
    """Return ``[R]`` COCO's average precisions of one class.

    An average precision is the mean over 101 recalls of the best precision at that recall or a higher one.
    """
    pairs = [(found[found[:, 0] == label], true[true[:, 0] == label]) for found, true in images]
    positives = times @ np.array([len(true) for _, true in pairs])
    scores = np.concatenate([found[:, 5].numpy() for found, _ in pairs])
    hit = np.concatenate([hits(found, true) for found, true in pairs])
    image = np.repeat(np.arange(len(pairs)), [len(found) for found, _ in pairs])
    order = np.argsort(-scores, kind="stable")
    hit, image = hit[order], image[order]
    values = np.full(len(times), np.nan)
    for row, counts in enumerate(times):
        if not positives[row]:
            continue
        counted = counts[image]
        right, all_found = np.cumsum(counted * hit), np.cumsum(counted)
        precision = right / np.maximum(all_found, 1)
        best = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
        values[row] = best[np.searchsorted(right / positives[row], _RECALLS)].mean()
    return values


def hits(found: Tensor, true: Tensor) -> np.ndarray:
    """Return ``[n]`` bool: the detections of one class in an image that find a box no better detection has found.

    Args:
        found: the detections, ``[n, 6]``.
        true: the true boxes, ``[m, 5]``.
    """
    hit = np.zeros(len(found), dtype=bool)
    free = np.ones(len(true), dtype=bool)
    common = iou(found[:, 1:5].double(), true[:, 1:].double()).numpy()
    for number in np.argsort(-found[:, 5].numpy(), kind="stable"):
        candidates = np.where(free, common[number], -1.0)
        if len(candidates) and candidates.max() >= OVERLAP:
            free[candidates.argmax()] = False
            hit[number] = True
    return hit
