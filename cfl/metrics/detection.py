"""Mean average precision of detected boxes, computed by torchmetrics with COCO's own evaluation.

Average precisions are not sums over samples, so a row of the matrix can only be computed from all boxes of its tests.
Until then the boxes are kept for every task, and for every client that has a model of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.metrics.bootstrap import bootstrapped
from cfl.metrics.collected import CollectedMatrix, Place
from cfl.metrics.transfer import average_accuracy
from cfl.runtime.errors import BadUpdate, diverged


class DetectionMatrix(CollectedMatrix):
    """The matrix of mean average precisions at overlaps from 0.5 to 0.95, and that at 0.5, in percent.

    Attributes:
        at_half: ``[..., T + 1, T]``, the average precisions at an overlap of 0.5, from 0 to 1.
        spread: ``[..., T + 1, T]``, their standard deviations over resampled test images.

    Arguments and errors as for :class:`TaskMatrix`.
    """

    higher_is_better = True
    scale = 100.0
    at_half: Tensor
    spread: Tensor

    def __init__(self, num_tasks: int, num_clients: int | None = None) -> None:
        super().__init__(num_tasks, num_clients)
        self.add_state("at_half", torch.zeros_like(self.sums), dist_reduce_fx="sum", persistent=True)
        self.add_state("spread", torch.zeros_like(self.sums), dist_reduce_fx="sum", persistent=True)

    def update(self, row: int, task: int, found: Tensor, true: Tensor, client: int | None = None) -> None:
        """Keep the boxes of one batch or one whole test set; :meth:`add_up` computes the row.

        Other arguments and errors as for :meth:`TaskMatrix.add`.

        Args:
            found: ``[B, n, 6]``, as :func:`cfl.metrics.boxes.detections` returns them.
            true: ``[B, M, 5]``: class (-1 for none), left, top, right and bottom.

        Raises:
            BadUpdate: a detection is not finite.
        """
        place = self._place(row, task, client)
        if not bool(found.isfinite().all()):
            raise BadUpdate(diverged(len(true), task, "a box or score", math.nan))
        pairs = zip(found.detach().cpu().float(), true.cpu().float(), strict=True)
        self._seen.setdefault(place, []).extend((one[one[:, 0] >= 0], other[other[:, 0] >= 0]) for one, other in pairs)

    def _set(self, place: Place, found: list[tuple[Tensor, Tensor]]) -> None:
        value, at_half = mean_average_precisions(found)
        if not math.isnan(value):
            self.sums[place], self.at_half[place], self.counts[place] = value, at_half, 1
            self.spread[place] = float(np.nanstd(bootstrapped(found)))

    def beside(self) -> dict[str, Tensor]:
        """See :meth:`TaskMatrix.beside`: the average precisions at an overlap of 0.5."""
        return {"map50": self.compute_at_half()}

    def details(self, after: int) -> dict[str, Any]:
        """See :meth:`TaskMatrix.details`: ``map50`` of each task and its standard deviation, both in percent.

        The deviation is over resampled test images (:mod:`cfl.metrics.bootstrap`). Empty with a matrix per client.
        """
        if self.num_clients is not None:
            return {}
        spread = (self.scale * self.spread.cpu()).masked_fill(self.counts.cpu() == 0, math.nan)
        return {
            "map50_by_task": self.compute_at_half()[after].tolist(),
            "map50_bootstrap": spread[after].tolist(),
        }

    def compute_at_half(self) -> Tensor:
        """The matrix at an overlap of 0.5, of the shape of :meth:`compute`."""
        counts = self.counts.cpu()
        return (self.scale * self.at_half.cpu() / counts).masked_fill(counts == 0, math.nan)[..., :-1, :]

    def _figures(self, a: Tensor, t: int) -> dict[str, Tensor]:
        return {**self._mean_and_transfers("map", a, t), "map50": average_accuracy(self.compute_at_half(), t)}


def mean_average_precisions(images: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean average precision at overlaps from 0.5 to 0.95, and at 0.5, from 0 to 1; NaN without a true box.

    Args:
        images: for each image, the detections ``[n, 6]`` and the true boxes ``[m, 5]``, without padding.
    """
    from torchmetrics.detection.mean_ap import MeanAveragePrecision

    # COCO's thresholds. torchmetrics' own are rounded to float32, so that a recall of 0.3 is below the threshold 0.3.
    metric: Any = MeanAveragePrecision(
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(), rec_thresholds=np.linspace(0, 1, 101).tolist()
    )
    found = [{"boxes": one[:, 1:5], "scores": one[:, 5], "labels": one[:, 0].long()} for one, _ in images]
    true = [{"boxes": other[:, 1:], "labels": other[:, 0].long()} for _, other in images]
    metric.update(found, true)
    values = metric.compute()
    if not any(len(other) for _, other in images):
        return math.nan, math.nan
    return float(values["map"]), float(values["map_50"])
