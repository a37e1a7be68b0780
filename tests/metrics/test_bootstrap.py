"""The bootstrap's average precisions equal those of COCO's evaluation, and vary less with more images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cfl.metrics.bootstrap import bootstrapped, hits, mean_precisions
from cfl.metrics.detection import DetectionMatrix, mean_average_precisions

pytest.importorskip("pycocotools")

Image = tuple[Tensor, Tensor]


def image(seed: int, ties: bool = False) -> Image:
    """Return detections and true boxes of an image with two classes. With ties, scores have one decimal."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    count = int(torch.randint(0, 5, (), generator=generator))
    corners = uniform(count, 2) * 60
    true = torch.cat([(uniform(count, 1) * 2).floor(), corners, corners + 10 + 30 * uniform(count, 2)], 1)
    near = true.repeat(3, 1)
    near[:, 1:] += 8 * (uniform(len(near), 4) - 0.5)
    elsewhere = torch.tensor([[0.0, 0, 0, 30, 30], [1, 20, 20, 70, 60]])
    found = torch.cat([near, elsewhere])
    scores = uniform(len(found), 1)
    return torch.cat([found, (10 * scores).floor() / 10 if ties else scores], 1), true


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_precisions_are_those_of_coco(seed: int) -> None:
    """Average precisions equal COCO's, also if images count several times, which COCO gets several times."""
    images, tied = ([image(100 * seed + number, ties) for number in range(12)] for ties in (False, True))
    times = np.random.default_rng(seed).integers(0, 3, 12)
    repeated = [one for one, count in zip(images, times, strict=True) for _ in range(count)]
    assert mean_precisions(images, times[None]) == pytest.approx(mean_average_precisions(repeated)[1], abs=1e-6)
    assert mean_precisions(tied, np.ones((1, 12))) == pytest.approx(mean_average_precisions(tied)[1], abs=1e-6)


def test_without_a_box_there_is_no_value() -> None:
    found, true = image(3)
    assert np.isnan(mean_precisions([(found, true[:0])], np.array([[1]]))).all()
    assert len(true) > 0
    assert np.isnan(mean_precisions([(found, true)], np.array([[0], [1]]))).tolist() == [True, False]


def test_a_box_is_found_once() -> None:
    true = torch.tensor([[0.0, 0, 0, 10, 10]])
    found = torch.tensor([[0.0, 0, 0, 10, 9, 0.5], [0, 0, 0, 10, 10, 0.9], [0, 0, 0, 10, 4, 0.95]])
    assert hits(found, true).tolist() == [False, True, False]


def test_an_overlap_of_half_counts_as_found() -> None:
    image = torch.tensor([[0.0, 0, 0, 10, 5, 0.9]]), torch.tensor([[0.0, 0, 0, 10, 10]])
    assert mean_precisions([image], np.array([[1]])) == mean_average_precisions([image])[1] == 1


def test_images_are_drawn_with_replacement() -> None:
    """Mean and spread are those of images drawn by another generator, each draw scored by COCO."""
    images = [image(number) for number in range(10)]
    generator, drawn = np.random.default_rng(7), []
    for _ in range(200):
        some = [images[place] for place in generator.integers(0, 10, 10)]
        drawn.append(mean_average_precisions(some)[1])
    ours = bootstrapped(images)
    assert np.nanmean(ours) == pytest.approx(np.mean(drawn), abs=3 * np.std(drawn) * (2 / 200) ** 0.5)
    assert np.nanstd(ours) == pytest.approx(
        np.std(drawn), rel=3 / 200**0.5
    )  # the deviation of s / sigma is 1 / sqrt(2 n)


def test_more_images_vary_less() -> None:
    few, many = ([image(number) for number in range(count)] for count in (8, 72))
    assert bootstrapped(few).std() > 1.5 * bootstrapped(many).std() > 0
    assert np.allclose(bootstrapped(few), bootstrapped(few[::-1]))


def test_a_run_says_how_far_its_figures_would_vary() -> None:
    images = [image(number) for number in range(8)]
    matrix = DetectionMatrix(2)
    for found, true in images:
        matrix.add(1, 0, found[None], true[None], None)
    matrix.add_up(1)
    told = matrix.details(1)
    assert told["map50_by_task"][0] == pytest.approx(100 * mean_average_precisions(images)[1])
    assert told["map50_bootstrap"][0] == pytest.approx(100 * bootstrapped(images).std())
    assert np.isnan([told["map50_by_task"][1], told["map50_bootstrap"][1]]).all()
    assert DetectionMatrix(2, 3).details(1) == {}
