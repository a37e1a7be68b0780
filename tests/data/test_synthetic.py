"""Synthetic images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cfl.data.sources import Synthetic
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("shape", "classes", "noise"),
    [(None, 10, 40.0), ([3, 8, 8], 20, 40.0), ([2, 5, 7], 4, 40.0), ([1, 16, 16], 10, 80.0)],
)
def test_synthetic_is_learnable_by_least_squares(tmp_path, shape, classes, noise):
    source = Synthetic(num_classes=classes, shape=shape, train_size=1500, noise=noise)
    train, test = source.load(tmp_path)

    def features(part: ImageSet) -> np.ndarray:
        flat = part.images.numpy().reshape(len(part), -1) / 255.0
        return np.column_stack([flat, np.ones(len(part))])

    weights, *_ = np.linalg.lstsq(features(train), np.eye(classes)[train.labels.numpy()], rcond=None)
    predicted = (features(test) @ weights).argmax(1)
    assert (predicted == test.labels.numpy()).mean() > 0.9
    assert tuple(train.images.shape[1:]) == source.shape == tuple(shape or (1, 8, 8))


def test_synthetic_sizes_balance_and_seeds(tmp_path):
    source = Synthetic(num_classes=7, train_size=100, test_size=30)
    train, test = source.load(tmp_path)
    counts = torch.bincount(train.labels, minlength=7)
    assert (len(train), len(test)) == (100, 30)
    assert counts.max() - counts.min() == 1
    again, _ = Synthetic(num_classes=7, train_size=100, test_size=30).load(tmp_path)
    assert torch.equal(train.images, again.images)
    other, _ = Synthetic(num_classes=7, train_size=100, test_size=30, seed=1).load(tmp_path)
    assert not torch.equal(train.images, other.images)
    assert not torch.equal(train.images[:30], test.images)


def test_synthetic_noise_is_in_stored_values(tmp_path):
    train, _ = Synthetic(num_classes=2, shape=[1, 20, 20], train_size=400, test_size=2, noise=10.0).load(tmp_path)
    one = train.images[train.labels == 0].double()
    assert float(one.std(0).mean()) == pytest.approx(10.0, rel=0.03)
    silent, _ = Synthetic(num_classes=2, shape=[1, 4, 4], train_size=9, test_size=2, noise=0.0).load(tmp_path)
    assert len(torch.unique(silent.images.flatten(1), dim=0)) == 2


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("num_classes", {"num_classes": 0}),
        ("shape", {"shape": [1, 8]}),
        ("shape", {"shape": [1, 8, 0]}),
        ("train_size", {"train_size": 9}),
        ("test_size", {"test_size": 0}),
        ("noise", {"noise": -1.0}),
        ("noise", {"noise": float("nan")}),
    ],
)
def test_synthetic_options_are_validated(key, options):
    with pytest.raises(ConfigError, match=rf"data\.stream\.source\.{key} = "):
        Synthetic(**options)
