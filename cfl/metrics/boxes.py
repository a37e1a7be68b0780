"""The grid, loss and detections of a one-stage detector of boxes in images, in plain torch with static shapes.

A target is ``[M, 5]`` float32: class, left, top, right and bottom in pixels; rows of class -1 are padding. The network
returns 5 + K numbers ``t`` for each of the :data:`PER_CELL` predictors in every cell of a grid of :data:`STRIDE`
pixels, as a map ``[PER_CELL (5 + K), rows, columns]``::

    centre      stride (column + sigmoid(t0)), stride (row + sigmoid(t1))
    size        stride exp(t2), stride exp(t3)                      t2 and t3 are cut off at -4 and 4
    objectness  sigmoid(t4)
    class       softmax(t5 ...)

The sizes with which a network starts, its anchors, are therefore exponentials of the head's biases.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRIDE = 16
"""Pixels between the centres of two cells, across and down."""
PER_CELL = 3
"""Predictors in a cell, each with one anchor."""
FOUND = 100
"""Largest number of detections in an image."""
_NUMBERS = 5
_LARGEST = 4.0
_CANDIDATES = FOUND * PER_CELL
"""Largest number of boxes of an image before suppression: every object may be found by all predictors of its cell."""
_RIVALS_ABOVE = 0.5
"""A detection is left out if it overlaps more than this with a better one of its class."""
_LLOYD_STEPS = 50
"""Largest number of steps of the algorithm that finds anchors."""


def grid_size(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the grid over an image."""
    return -(-height // STRIDE), -(-width // STRIDE)


def num_outputs(shape: tuple[int, int, int], classes: int) -> int:
    """Return the number of outputs of a network for an image ``(C, H, W)``, over all cells."""
    rows, columns = grid_size(*shape[1:])
    return PER_CELL * (_NUMBERS + classes) * rows * columns


def num_classes(shape: tuple[int, int, int], outputs: int) -> int | None:
    """The inverse of :func:`num_outputs`; None if there is none."""
    classes = outputs // num_outputs(shape, 1 - _NUMBERS) - _NUMBERS
    return classes if classes > 0 and num_outputs(shape, classes) == outputs else None


def iou(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union ``[..., n, m]`` of boxes ``[..., n, 4]`` and ``[..., m, 4]``; 0 of empty ones."""
    a, b = one.unsqueeze(-2), other.unsqueeze(-3)
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    common = sides.prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1) for boxes in (a, b)]
    return common / (areas[0] + areas[1] - common).clamp(min=1e-9)


def _placed(outputs: Tensor, rows: int, columns: int) -> Tensor:
    """Outputs ``[N, O]`` as ``[N, rows, columns, PER_CELL, 5 + K]``."""
    return outputs.unflatten(-1, (PER_CELL, -1, rows, columns)).movedim((-2, -1), (1, 2))


def detection_losses(outputs: Tensor, y: Tensor, rows: int, columns: int) -> Tensor:
    """Return the losses ``[N]`` of images: place, size and class of every box, and objectness of every predictor.

    A box belongs to the cell of its centre, and there to the predictor whose predicted size is most like its own. The
    terms of a box are the cross-entropies of the centre's place in the cell, the squared errors of the logarithms of
    the sizes, and the cross-entropy of the class. The terms of objectness are cross-entropies over the whole grid, in
    which predictors without a box count half. The sum is divided by the number of boxes in the image, at least 1.

    Args:
        outputs: the network's outputs, ``[N, O]``.
        y: the targets, ``[N, M, 5]``.
        rows: number of rows of the grid.
        columns: number of columns of the grid.
    """
    t = _placed(outputs, rows, columns)
    n, m = y.shape[:2]
    classes, corners = y[..., 0].long(), y[..., 1:].to(t.dtype)
    real = classes >= 0
    centre, size = (corners[..., :2] + corners[..., 2:]) / 2, (corners[..., 2:] - corners[..., :2]).clamp(min=1)
    at = (centre / STRIDE).floor().long()
    cell = torch.stack([at[..., 0].clamp(0, columns - 1), at[..., 1].clamp(0, rows - 1)], -1)
    place = cell[..., 1] * columns + cell[..., 0]  # [N, M]
    there = t.flatten(1, 2).gather(1, place[..., None, None].expand(n, m, *t.shape[-2:]))  # [N, M, PER_CELL, 5 + K]
    log_size = (size / STRIDE).log().unsqueeze(-2)
    predicted = there[..., 2:4].detach().clamp(-_LARGEST, _LARGEST)
    common = torch.minimum(predicted, log_size).exp().prod(-1)
    likeness = common / (predicted.exp().prod(-1) + log_size.exp().prod(-1) - common)
    best = likeness.argmax(-1)  # [N, M]
    own = there.gather(2, best[..., None, None].expand(n, m, 1, t.shape[-1])).squeeze(2)
    offset = (centre / STRIDE - cell).clamp(0, 1)
    of_box = F.binary_cross_entropy_with_logits(own[..., :2], offset, reduction="none").sum(-1)
    of_box = of_box + (own[..., 2:4] - log_size.squeeze(-2)).square().sum(-1)
    log_p = own[..., _NUMBERS:].log_softmax(-1)
    of_box = of_box - log_p.gather(-1, classes.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    # Padding is scattered to one more place behind the grid, which is then cut off.
    predictor = torch.where(real, place * PER_CELL + best, rows * columns * PER_CELL)
    found = torch.zeros(n, rows * columns * PER_CELL + 1, dtype=t.dtype, device=t.device)
    found = found.scatter(1, predictor, 1.0)[:, :-1]
    objectness = F.binary_cross_entropy_with_logits(t[..., 4].flatten(1), found, reduction="none")
    of_grid = (objectness * (0.5 + 0.5 * found)).sum(1)
    of_boxes = torch.where(real, of_box, torch.zeros_like(of_box)).sum(1)
    return (of_grid + of_boxes) / real.sum(1).clamp(min=1)


def decoded(outputs: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Boxes ``[N, P, 4]`` in pixels and the score of every class ``[N, P, K]``, of all P predictors."""
    t = _placed(outputs, rows, columns)
    x, y = (torch.arange(n, device=t.device, dtype=t.dtype) for n in (columns, rows))
    corner = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).unsqueeze(-2)  # [rows, columns, 1, 2]
    centre = STRIDE * (corner + t[..., :2].sigmoid())
    half = STRIDE * t[..., 2:4].clamp(-_LARGEST, _LARGEST).exp() / 2
    scores = t[..., 4:5].sigmoid() * t[..., _NUMBERS:].softmax(-1)
    return torch.cat([centre - half, centre + half], -1).flatten(1, 3), scores.flatten(1, 3)


def suppressed(boxes: Tensor, scores: Tensor, classes: Tensor, above: float) -> Tensor:
    """Non-maximum suppression: ``[N, n]`` bool, True where a better box of the same class overlaps.

    Args:
        boxes: ``[N, n, 4]``, the best first.
        scores: ``[N, n]``, not increasing.
        classes: ``[N, n]`` int64.
        above: overlap, as intersection over union, above which the worse box is left out.
    """
    gone, places = torch.zeros_like(scores, dtype=torch.bool), torch.arange(boxes.shape[1], device=boxes.device)
    for better in range(boxes.shape[1] - 1):  # not all pairs at once, which would take n times the memory
        one = slice(better, better + 1)
        rivals = (iou(boxes[:, one], boxes).squeeze(1) > above) & (classes[:, one] == classes) & (places > better)
        gone = gone | (rivals & ~gone[:, one])
    return gone


def detections(outputs: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the detections ``[N, n, 6]``: class, left, top, right, bottom and score, the best first.

    An image has at most :data:`FOUND` detections. Rows of class -1 are padding.

    Args:
        outputs: the network's outputs, ``[N, O]``.
        shape: ``(C, H, W)`` of the images. Boxes are cut off at their edges.
    """
    _, height, width = shape
    boxes, scores = decoded(outputs, *grid_size(height, width))
    classes = scores.shape[-1]
    best, order = scores.flatten(1).topk(min(_CANDIDATES, scores[0].numel()), dim=1)
    which, predictor = order % classes, order // classes
    limits = torch.tensor([width, height, width, height], device=boxes.device, dtype=boxes.dtype)
    kept = boxes.gather(1, predictor.unsqueeze(-1).expand(-1, -1, 4)).clamp(min=0).minimum(limits)
    gone = suppressed(kept, best, which, _RIVALS_ABOVE)
    label = torch.where(gone, -1, which).to(boxes.dtype)
    found = torch.cat([label.unsqueeze(-1), kept, best.unsqueeze(-1)], -1)
    first = gone.int().argsort(dim=1, stable=True)[:, :FOUND]  # those that are left, still the best first
    return found.gather(1, first.unsqueeze(-1).expand(-1, -1, found.shape[-1]))


def anchors(y: Tensor) -> Tensor:
    """Return anchors ``[PER_CELL, 2]``, widths and heights in pixels, ascending by area.

    They are the centres of clusters of the boxes' sizes, found by Lloyd's algorithm on the logarithms of the sizes. It
    starts from evenly spaced quantiles of the areas, so nothing is random.

    Args:
        y: the targets, ``[N, M, 5]``; without any box the anchors are squares of 1, 2 and 4 cells.
    """
    real = y[y[..., 0] >= 0]
    sizes = (real[:, 3:] - real[:, 1:3]).double().clamp(min=1).log()
    if not len(sizes):
        return torch.tensor([[STRIDE * 2.0**k] * 2 for k in range(PER_CELL)])
    sizes = sizes[sizes.sum(1).argsort(stable=True)]
    places = ((torch.arange(PER_CELL) + 0.5) / PER_CELL * len(sizes)).long().clamp(max=len(sizes) - 1)
    centres = sizes[places]
    for _ in range(_LLOYD_STEPS):
        nearest = (sizes.unsqueeze(1) - centres).square().sum(-1).argmin(1)
        moved = torch.stack(
            [sizes[nearest == k].mean(0) if bool((nearest == k).any()) else c for k, c in enumerate(centres)]
        )
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres[centres.sum(1).argsort(stable=True)].exp().float()
