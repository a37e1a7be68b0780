"""A small one-stage detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from cfl.metrics import boxes
from cfl.models.base import Network
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers

_RARE = 0.01
"""Probability of a box that every predictor gives before training."""


class TinyYOLO(Network):
    """Five 3 x 3 convolutions, four of them with stride 2, and a 1 x 1 one that predicts boxes in grid cells.

    The outputs of a cell of 16 x 16 pixels depend on 63 x 63 pixels.

    It follows YOLO (Redmon et al., 2016; Redmon and Farhadi, 2018), with static shapes. Outputs are the grid's numbers,
    flattened; :mod:`cfl.metrics.boxes` has their meaning and the loss. Before the first round the biases of the head
    are set from the sizes of :func:`cfl.metrics.boxes.anchors` of the first task's training boxes.

    Args:
        input_shape: ``(C, H, W)`` of one image.
        num_outputs: numbers of all cells together, as set by ``data.scenario: detection``.
        width: maps after the first convolution, at least 1; the others have 2, 4, 8 and 8 times as many.

    Raises:
        ConfigError: ``num_outputs`` is not that of a grid of boxes, or ``width`` is out of range.
    """

    predicts: ClassVar[str] = "boxes"
    head: nn.Conv2d  # type: ignore[assignment]

    def __init__(self, input_shape: tuple[int, int, int], num_outputs: int, width: int = 16) -> None:
        super().__init__(input_shape, num_outputs)
        check_integers("model.network", 1, width=width)
        classes = boxes.num_classes(self.input_shape, num_outputs)
        if classes is None:
            valid = f"a network with labels, or data.scenario detection: {num_outputs} outputs are no grid of boxes"
            raise ConfigError("model.network", type(self).__name__, valid)
        self.num_classes, self.width = classes, width
        maps = [self.input_shape[0], width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(maps)
        )
        self.stages.append(nn.Conv2d(maps[-1], maps[-1], 3, padding=1))
        self.head = nn.Conv2d(maps[-1], boxes.PER_CELL * (5 + classes), 1)
        with torch.no_grad():
            self._biases()[:, 4] = math.log(_RARE / (1 - _RARE))
        self.start_from(torch.zeros(0, 0, 5))

    @torch.no_grad()
    def start_from(self, y: Tensor) -> None:
        """Set the head's biases so that predicted sizes start from those of training boxes ``[N, M, 5]``."""
        bias = self._biases()
        bias[:, 2:4] = (boxes.anchors(y) / boxes.STRIDE).log().to(bias)

    def _biases(self) -> Tensor:
        return cast(Tensor, self.head.bias).view(boxes.PER_CELL, -1)

    def features(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the maps ``[B, d, rows, columns]`` from which boxes are predicted."""
        for stage in self.stages:
            x = relu(stage(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` to the grid's numbers ``[B, num_outputs]``."""
        numbers: Tensor = self.head(self.features(x)).flatten(1)
        return numbers

    def answers(self, x: Tensor, clients: Sequence[int] = (0,)) -> Tensor:
        """Images ``[B, C, H, W]`` to :func:`cfl.metrics.boxes.detections`."""
        return boxes.detections(self(x), self.input_shape)
