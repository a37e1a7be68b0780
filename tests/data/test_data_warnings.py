"""Warnings before a run: about data that say whose samples they are, and about images probably read wrongly."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from support.tiny import permuted, tiny_data

from cfl.data.partitions import IID, Natural
from cfl.data.sources import Arrays, Synthetic
from cfl.data.streams import Sequence


def prepared(source: Arrays | Synthetic, natural: bool = False) -> list[str]:
    """The warnings while the data of a run are prepared."""
    data = tiny_data(Sequence([source]), partition=Natural() if natural else IID(), num_clients=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.prepare_data()
        data.setup("fit")
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("owners", "natural", "told"), [([0, 1, 2], False, True), ([0, 1, 2], True, False), ([5], False, False)]
)
def test_data_that_say_whose_each_sample_is(owners: list[int], natural: bool, told: bool, tmp_path: Path) -> None:
    images, labels = np.zeros((12, 4, 4), np.uint8), np.arange(12) % 2
    clients = np.array(owners)[np.arange(12) // 2 % len(owners)]
    np.savez(
        tmp_path / "a.npz",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        train_clients=clients,
    )
    expected = ["the data say whose each sample is, and data.partition = IID deals samples otherwise; "]
    found = prepared(Arrays(str(tmp_path / "a.npz")), natural)
    assert [one.startswith(text) for one, text in zip(found, expected if told else [], strict=True)] == [True] * told


@pytest.mark.parametrize(
    ("shape", "told"),
    [((8, 3, 8), True), ((28, 1, 28), True), ((8, 8, 3), True), ((3, 8, 8), False), ((8, 8, 8), False)],
)
def test_channels_that_may_be_pixels(shape: tuple[int, int, int], told: bool) -> None:
    found = prepared(Synthetic(num_classes=2, shape=list(shape), train_size=24, test_size=4))
    channels, height, width = shape
    assert bool(found) is told
    assert all(f"images are read as {channels} channels of {height} x {width} pixels" in one for one in found)


def test_nothing_is_warned_of_a_usual_run() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = tiny_data(permuted())
        data.prepare_data()
        data.setup("fit")
