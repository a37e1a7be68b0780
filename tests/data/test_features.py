"""Vectors of numbers from an ``.npz`` file."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.tiny import fit, tiny_client, tiny_data

from cfl.data.sources import Arrays, CsvTable, Features
from cfl.data.streams import ClassSplit, Permuted
from cfl.runtime.errors import ConfigError, DataFilesMissing
from cfl.testing import check_source


def arrays(**other: Any) -> dict[str, NDArray[Any]]:
    """Samples of four classes in five dimensions of very different scale. The last dimension is constant."""
    generator = np.random.default_rng(0)
    points, found = generator.normal(size=(4, 5)), {}
    for part, size in (("train", 80), ("test", 40)):
        labels = np.arange(size) % 4
        values = (points[labels] + generator.normal(scale=0.3, size=(size, 5))) * [1e-3, 1, 50, 1e4, 0] + 3
        found |= {f"{part}_features": values, f"{part}_labels": labels}
    return found | other


def stored(folder: Path, **other: Any) -> str:
    np.savez(folder / "f.npz", **arrays(**other))
    return str(folder / "f.npz")


def test_features_have_mean_0_and_deviation_1_over_the_training_set(tmp_path: Path) -> None:
    source, held = Features(stored(tmp_path), max_test=20), arrays()
    assert (source.shape, source.num_classes, source.name) == ((1, 1, 5), 4, "f")
    train, test = source.load(tmp_path)
    assert (train.images.dtype, list(test.images.shape)) == (torch.float32, [20, 1, 1, 5])
    values = train.images.double().flatten(1)
    torch.testing.assert_close(values.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-6)
    deviations = values.std(0, correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1, 1, 1, 0]).double(), rtol=0, atol=1e-6)
    mean, std = held["train_features"].mean(0), held["train_features"].std(0)
    std[4] = 1
    expected = torch.from_numpy((held["test_features"] - mean) / std).float()
    whole = Features(stored(tmp_path)).load(tmp_path)[1].images.flatten(1)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)
    assert torch.equal(source.transform()(train.images), train.images)
    check_source(source, tmp_path)


@pytest.mark.parametrize("value", [0.1, -1e9 / 3])
def test_a_constant_feature_becomes_0_though_sums_round(value: float, tmp_path: Path) -> None:
    """A constant feature becomes exactly 0, although a mean of equal numbers may differ from them in the last digit."""
    held = arrays()
    for part in ("train", "test"):
        held[f"{part}_features"][:, 4] = value
    held["test_features"][0, 4] = value + 0.01
    source = Features(stored(tmp_path, **held))
    train, test = source.load(tmp_path)
    assert not train.images[..., 4].any()
    assert not test.images[1:, ..., 4].any()
    assert test.images[0, ..., 4].item() == pytest.approx(0.01, rel=1e-4)
    assert source.moments(tmp_path)[1][4] == 1  # type: ignore[index]


def test_features_as_they_are(tmp_path: Path) -> None:
    train, test = Features(stored(tmp_path), dimensions=5, num_classes=4, standardise=False).load(tmp_path)
    held = arrays()
    assert torch.equal(train.images.flatten(1), torch.from_numpy(held["train_features"]).float())
    assert torch.equal(test.labels, torch.from_numpy(held["test_labels"]))
    assert Features(stored(tmp_path), standardise=False).moments(tmp_path) is None


@pytest.mark.parametrize("stream", [ClassSplit, Permuted])
def test_a_network_for_vectors_learns_them(stream: Any, tmp_path: Path) -> None:
    """A network learns vectors, and training leaves the stored samples unchanged."""
    data = tiny_data(stream(Features(stored(tmp_path)), 2), eval_batch_size=1000)
    before = [task.test.images.clone() for task in data.tasks] + [task.train.images.clone() for task in data.tasks]
    federation = fit(tiny_client(data), data)
    acc = federation.accuracy.summary(after=1)["acc"]
    assert acc is not None
    assert acc > 40  # chance is 25 among the four classes of a permuted task
    after = [task.test.images for task in data.tasks] + [task.train.images for task in data.tasks]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train_features": np.zeros((80, 5), dtype=np.int64)}, "train_features are int64, train_labels int64"),
        ({"train_features": np.zeros((80, 5, 1))}, r"train_features are \[80, 5, 1\]"),
        ({"test_features": np.zeros((40, 6))}, r"a train feature is \[5\], a test feature \[6\]"),
        ({"train_features": np.full((80, 5), np.nan)}, "it holds NaN or infinity"),
        ({"test_features": np.full((40, 5), 1e300)}, "it holds numbers that float32 cannot"),
        ({"train_clients": np.zeros(3, dtype=np.int64)}, r"train_clients are int64 \[3\], not 80 integers or names"),
        ({"test_clients": np.zeros(3)}, r"test_clients are float64 \[3\], not 40 integers or names"),
    ],
)
def test_what_a_file_may_not_hold(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataFilesMissing, match=rf"f\.npz cannot be used: {said}"):
        Features(stored(tmp_path, **other), num_classes=4, standardise=False).load(tmp_path)


def test_names_of_classes_are_texts_for_each(tmp_path: Path) -> None:
    assert Features(stored(tmp_path)).names(tmp_path) == ("0", "1", "2", "3")
    named = stored(tmp_path, class_names=np.array(["a", "b", "c", "d"]))
    assert Features(named).names(tmp_path) == ("a", "b", "c", "d")
    with pytest.raises(DataFilesMissing, match=r"class_names are <U1 \[2\], not 4 texts"):
        Features(stored(tmp_path, class_names=np.array(["a", "b"]))).names(tmp_path)


@pytest.mark.parametrize("kind", [Arrays, Features, partial(CsvTable, label="kind")])
def test_an_absent_file_can_be_replaced_by_options_that_there_are(kind: Any, tmp_path: Path) -> None:
    """The options that the message names are taken, and the sizes are then known; no message names another one."""
    path = str(tmp_path / "nofile")
    for field in ("shape", "num_classes"):
        with pytest.raises(ConfigError) as refused:
            getattr(kind(path), field)
        assert f"valid: a file: {path} does not exist" in str(refused.value)
        named = re.findall(r"data\.stream\.source\.(\w+)", refused.value.valid)
        values = {"shape": [1, 2, 2], "dimensions": 4, "num_classes": 3}
        if named:
            given = kind(path, **{name: values[name] for name in named})
            assert given.num_classes == 3
            assert torch.Size(given.shape).numel() == 4
        assert bool(named) == (kind in (Arrays, Features))


def test_another_number_of_dimensions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.stream\.source\.dimensions = 6 cannot work; valid: 5"):
        Features(stored(tmp_path), dimensions=6).load(tmp_path)
