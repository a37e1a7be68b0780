"""Overlaps, suppression, loss and decoding of a grid of boxes equal those of plain loops."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from cfl.data.augmentation import CropFlip
from cfl.metrics import boxes
from cfl.metrics.measure import measure_named
from cfl.models import TinyYOLO
from cfl.runtime.errors import ConfigError

SHAPE = (1, 40, 48)
ROWS, COLUMNS, CLASSES = 3, 3, 2


def overlap(one: list[float], other: list[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return common / (sum(areas) - common)


def drawn(count: int, seed: int) -> Tensor:
    """``[count, 4]`` boxes in an image of 48 x 40 pixels."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=generator) * torch.tensor([30.0, 25.0])
    return torch.cat([corner, corner + 2 + torch.rand(count, 2, generator=generator) * 12], 1)


def targets(seed: int, images: int = 3, most: int = 4) -> Tensor:
    y = torch.cat([torch.zeros(images * most, 1), drawn(images * most, seed)], 1).view(images, most, 5)
    y[..., 0] = torch.randint(-1, CLASSES, (images, most), generator=torch.Generator().manual_seed(seed))
    y[0, :, 0] = -1  # an image without a box
    return y


def outputs(seed: int, images: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(images, boxes.num_outputs(SHAPE, CLASSES), generator=generator, dtype=torch.float64)


def test_overlaps() -> None:
    one, other = drawn(5, 0), drawn(7, 1)
    expected = torch.tensor([[overlap(a, b) for b in other.tolist()] for a in one.tolist()])
    torch.testing.assert_close(boxes.iou(one, other), expected)


@pytest.mark.parametrize("above", [0.2, 0.5])
def test_suppression_keeps_what_a_loop_keeps(above: float) -> None:
    n = 30
    found = torch.stack([drawn(n, seed) for seed in range(4)])
    scores = torch.rand(4, n, generator=torch.Generator().manual_seed(5)).sort(1, descending=True).values
    classes = torch.randint(0, 2, (4, n), generator=torch.Generator().manual_seed(6))
    gone = boxes.suppressed(found, scores, classes, above)
    assert 0 < int(gone.sum()) < gone.numel()
    for image in range(4):
        kept: list[int] = []
        for k in range(n):
            rivals = [j for j in kept if classes[image, j] == classes[image, k]]
            if all(overlap(found[image, j].tolist(), found[image, k].tolist()) <= above for j in rivals):
                kept.append(k)
        assert (~gone[image]).nonzero().flatten().tolist() == kept


def numbers_at(t: Tensor, predictor: int, row: int, column: int) -> list[float]:
    """Return the 5 + K numbers of a predictor, in the layout that the docstring of ``boxes`` gives."""
    maps = t.view(boxes.PER_CELL * (5 + CLASSES), ROWS, COLUMNS)
    return [float(maps[predictor * (5 + CLASSES) + k, row, column]) for k in range(5 + CLASSES)]


def sigmoid(t: float) -> float:
    return 1 / (1 + math.exp(-t))


def loss_of(t: Tensor, y: Tensor) -> float:
    """Return one image's loss, computed predictor by predictor."""
    real = [box for box in y.tolist() if box[0] >= 0]
    holds: set[tuple[int, int, int]] = set()
    total = 0.0
    for kind, left, top, right, bottom in real:
        x, v = (left + right) / 2 / boxes.STRIDE, (top + bottom) / 2 / boxes.STRIDE
        column, row = min(int(x), COLUMNS - 1), min(int(v), ROWS - 1)
        width, height = max(right - left, 1) / boxes.STRIDE, max(bottom - top, 1) / boxes.STRIDE
        likeness = []
        for k in range(boxes.PER_CELL):
            w, h = (math.exp(min(max(s, -4), 4)) for s in numbers_at(t, k, row, column)[2:4])
            common = min(w, width) * min(h, height)
            likeness.append(common / (w * h + width * height - common))
        best = likeness.index(max(likeness))
        holds.add((best, row, column))
        n = numbers_at(t, best, row, column)
        for place, said in ((x - column, n[0]), (v - row, n[1])):
            total -= place * math.log(sigmoid(said)) + (1 - place) * math.log(1 - sigmoid(said))
        total += (n[2] - math.log(width)) ** 2 + (n[3] - math.log(height)) ** 2
        total += math.log(sum(math.exp(c) for c in n[5:])) - n[5 + int(kind)]
    for k, row, column in product(range(boxes.PER_CELL), range(ROWS), range(COLUMNS)):
        p = sigmoid(numbers_at(t, k, row, column)[4])
        total -= math.log(p) if (k, row, column) in holds else 0.5 * math.log(1 - p)
    return total / max(len(real), 1)


def test_the_loss_is_that_of_a_loop() -> None:
    t, y = outputs(2), targets(3)
    found = boxes.detection_losses(t, y, ROWS, COLUMNS)
    assert found.tolist() == pytest.approx([loss_of(*pair) for pair in zip(t, y, strict=True)], rel=1e-6)
    assert torch.equal(measure_named("map").on(SHAPE).losses(t, y, None, None), found)


def test_padding_and_images_side_by_side_change_no_loss() -> None:
    t, y = outputs(4), targets(5)
    alone = torch.stack([boxes.detection_losses(t[k : k + 1], y[k : k + 1], ROWS, COLUMNS)[0] for k in range(3)])
    padded = torch.cat([y, torch.full((3, 2, 5), -1.0)], 1)
    mapped = torch.vmap(lambda t, y: boxes.detection_losses(t, y, ROWS, COLUMNS))(t.unsqueeze(1), y.unsqueeze(1))
    for found in (boxes.detection_losses(t, padded, ROWS, COLUMNS), mapped.squeeze(1)):
        torch.testing.assert_close(found, alone)


def test_what_is_decoded() -> None:
    t = outputs(6, 1)
    found, scores = boxes.decoded(t, ROWS, COLUMNS)
    assert found.shape == (1, ROWS * COLUMNS * boxes.PER_CELL, 4)
    places = product(range(ROWS), range(COLUMNS), range(boxes.PER_CELL))
    for box, score, (row, column, k) in zip(found[0], scores[0], places, strict=True):
        n = numbers_at(t[0], k, row, column)
        x, y = 16 * (column + sigmoid(n[0])), 16 * (row + sigmoid(n[1]))
        w, h = 16 * math.exp(n[2]), 16 * math.exp(n[3])
        assert box.tolist() == pytest.approx([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
        likely = [math.exp(c) / sum(math.exp(c) for c in n[5:]) for c in n[5:]]
        assert score.tolist() == pytest.approx([sigmoid(n[4]) * p for p in likely])


def test_a_perfect_grid_is_found_again() -> None:
    """Outputs that encode the true boxes are decoded to these boxes."""
    y = torch.tensor([[[1.0, 4, 6, 12, 20], [0, 30, 5, 46, 13], [-1, 0, 0, 0, 0]]])
    maps = torch.full((1, boxes.PER_CELL, 5 + CLASSES, ROWS, COLUMNS), -20.0)
    for kind, left, top, right, bottom in y[0, :2].tolist():
        x, v = (left + right) / 32, (top + bottom) / 32
        at = maps[0, 0, :, int(v), int(x)]
        at[:2] = torch.logit(torch.tensor([x % 1, v % 1]))
        at[2:4] = torch.tensor([right - left, bottom - top]).div(16).log()
        at[4], at[5 + int(kind)] = 20, 20
    found = boxes.detections(maps.flatten(1), SHAPE)[0]
    sure = found[(found[:, 0] >= 0) & (found[:, 5] > 0.5)]
    torch.testing.assert_close(sure[sure[:, 1].argsort(), :5], y[0, :2], rtol=0, atol=1e-3)
    assert bool((found[:, 1:5] >= 0).all())
    assert bool((found[:, [1, 3]] <= 48).all())


def test_many_objects_are_found_although_every_predictor_of_their_cells_finds_them() -> None:
    shape = (1, 160, 160)
    maps = torch.full((1, boxes.PER_CELL, 6, 10, 10), -20.0)
    maps[:, :, :2] = 0.0  # the centre of the cell
    maps[:, :, 2:4] = math.log(10 / 16)
    maps[:, 0, 4], maps[:, 1, 4], maps[:, 2, 4] = 3.0, 2.0, 1.0
    found = boxes.detections(maps.flatten(1), shape)[0]
    assert found.shape == (boxes.FOUND, 6)
    assert bool((found[:, 0] == 0).all())
    centres = (found[:, 1:3] + found[:, 3:5]) / 2
    assert sorted(map(tuple, centres.tolist())) == sorted(
        (16.0 * x + 8, 16.0 * y + 8) for x, y in product(range(10), repeat=2)
    )


def test_anchors_are_the_clusters_of_sizes() -> None:
    sizes = torch.tensor([[4.0, 6], [20, 20], [90, 50]])
    jitter = 1 + 0.02 * torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    widths = sizes.repeat(20, 1) * jitter
    y = torch.cat([torch.zeros(60, 3), widths], 1).view(20, 3, 5)
    torch.testing.assert_close(boxes.anchors(y), sizes, rtol=0.03, atol=0)
    assert boxes.anchors(y[:0]).tolist() == [[16, 16], [32, 32], [64, 64]]
    network = TinyYOLO(SHAPE, boxes.num_outputs(SHAPE, CLASSES), width=2)
    network.start_from(y)
    with torch.no_grad():
        network.head.weight.zero_()
        found, _ = boxes.decoded(network(torch.rand(1, *SHAPE)), ROWS, COLUMNS)
    torch.testing.assert_close((found[0, :3, 2:] - found[0, :3, :2]), boxes.anchors(y))


def test_a_network_for_another_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.scenario detection: 100 outputs are no grid"):
        TinyYOLO(SHAPE, 100)
    assert [boxes.num_classes(SHAPE, boxes.num_outputs(SHAPE, k)) for k in (1, 5)] == [1, 5]


@pytest.mark.parametrize(("padding", "flip"), [(5, True), (3, False), (0, True)])
def test_boxes_move_with_their_pixels(padding: int, flip: bool) -> None:
    """Augmentation moves a box with its pixels: in an image that is white in its box only, both stay together."""
    generator = torch.Generator().manual_seed(padding)
    images, labels = torch.zeros(40, 1, 12, 16, dtype=torch.uint8), torch.zeros(40, 2, 5)
    labels[:, 1, 0] = -1
    for image, box in zip(images, labels[:, 0], strict=True):
        left, top = (int(torch.randint(0, limit, (), generator=generator)) for limit in (12, 9))
        right, bottom = left + 2, top + 3
        image[0, top:bottom, left:right] = 255
        box[1:] = torch.tensor([left, top, right, bottom])
    augmentation = CropFlip(padding, flip)
    words = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    changed, moved = augmentation(images, words), augmentation.moved(labels, words, 12, 16)
    gone = 0
    for image, (box, padded) in zip(changed, moved, strict=True):
        rows, columns = image[0].any(1).nonzero().flatten().tolist(), image[0].any(0).nonzero().flatten().tolist()
        assert padded.tolist() == [-1, 0, 0, 0, 0]
        if not rows:
            assert box.tolist() == [-1, 0, 0, 0, 0]
            gone += 1
        else:
            assert box.tolist() == [0, columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    assert gone < 20
