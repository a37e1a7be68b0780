"""Arrays in .npz files: their layouts, sizes, options and damages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cfl.data.sources import Arrays
from cfl.runtime.errors import ConfigError, DataFilesMissing


def arrays_file(path: Path, shape: tuple[int, ...] = (6, 5, 3), classes: int = 4, **replaced: np.ndarray) -> dict:
    rng = np.random.default_rng(0)
    content = {}
    for part, n in (("train", 20), ("test", 8)):
        content[f"{part}_images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        content[f"{part}_labels"] = (np.arange(n) % classes).astype(np.uint8)
    content |= replaced
    np.savez(path, **content)
    return content


def test_arrays_channels_last_and_first_and_grey(tmp_path):
    content = arrays_file(tmp_path / "a.npz")
    source = Arrays("a.npz")
    train, test = source.load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), content["train_images"].transpose(0, 3, 1, 2))
    assert test.labels.tolist() == content["test_labels"].tolist()
    assert (source.name, source.shape, source.num_classes) == ("a", (3, 6, 5), 4)
    assert (source.mean, source.std) == ((0.0,) * 3, (1.0,) * 3)

    content = arrays_file(tmp_path / "first.npz", (3, 6, 5))
    train, _ = Arrays("first.npz", channels="first").load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), content["train_images"])

    content = arrays_file(tmp_path / "grey.npz", (6, 5))
    train, _ = Arrays("grey.npz", scale=16.0, mean=[0.2], std=[3.0]).load(tmp_path)
    np.testing.assert_array_equal(train.images[:, 0].numpy(), content["train_images"])


def test_arrays_with_the_channels_elsewhere_are_not_read_as_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path))
    content = arrays_file(tmp_path / "first.npz", (3, 6, 5))
    for use in (lambda: Arrays("first.npz").shape, lambda: Arrays("first.npz").load(tmp_path)):
        with pytest.raises(ConfigError, match=r"source\.channels = 'last' .*first\.npz has images \[3, 6, 5\]"):
            use()
    train, _ = Arrays("first.npz", shape=[5, 3, 6]).load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), content["train_images"].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_sizes_come_from_the_header_before_loading(tmp_path, monkeypatch, save):
    save(tmp_path / "b.npz", **arrays_file(tmp_path / "b.npz"))
    absolute = Arrays(str(tmp_path / "b.npz"))
    assert (absolute.shape, absolute.num_classes, len(absolute.std)) == ((3, 6, 5), 4, 3)
    relative = Arrays("b.npz")
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path))
    assert (relative.shape, relative.num_classes) == ((3, 6, 5), 4)


def test_arrays_of_another_folder_do_not_say_how_many_classes(tmp_path, monkeypatch):
    """Other classes in the file below ``data.root`` than in the file counted before are refused.

    The number of outputs is needed before the option ``data.root`` is known.
    """
    for folder, classes in (("here", 7), ("there", 4)):
        (tmp_path / folder).mkdir()
        arrays_file(tmp_path / folder / "a.npz", classes=classes)
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "here"))
    source = Arrays("a.npz")
    assert source.num_classes == 7
    with pytest.raises(ConfigError, match=r"source\.num_classes = 7 .*valid: 4, as .*there"):
        source.load(tmp_path / "there")
    assert len(Arrays("a.npz", num_classes=7).load(tmp_path / "there")[0]) > 0, "said on purpose"


def test_arrays_sizes_of_an_absent_file_must_be_given(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path))
    source = Arrays("absent.npz")
    for field in ("shape", "num_classes"):
        with pytest.raises(ConfigError) as refused:
            getattr(source, field)
        assert refused.value.valid.startswith(f"a file: {tmp_path / 'absent.npz'} does not exist. ")
        assert "data.stream.source.shape and data.stream.source.num_classes" in refused.value.valid
    with pytest.raises(ConfigError) as refused:
        _ = Arrays("absent.npz", numbers=True).shape
    assert "num_classes" not in refused.value.valid, "with numbers it has to be null"
    given = Arrays("absent.npz", shape=[3, 8, 8], num_classes=7)
    assert (given.shape, given.num_classes, given.mean) == ((3, 8, 8), 7, (0.0,) * 3)
    with pytest.raises(DataFilesMissing, match=r"absent\.npz is missing.*train_images.*CFL_DATA_ROOT"):
        given.load(tmp_path)


def test_arrays_contradicting_the_file_is_refused(tmp_path):
    arrays_file(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=r"source\.shape.*\[3, 6, 5\]"):
        Arrays("a.npz", shape=[3, 5, 6]).load(tmp_path)
    with pytest.raises(ConfigError, match=r"source\.num_classes.*at least 4"):
        Arrays("a.npz", num_classes=3).load(tmp_path)
    with pytest.raises(ConfigError, match=r"source\.std.*3 number"):
        Arrays("a.npz", std=[1.0]).load(tmp_path)
    with pytest.raises(ConfigError, match=r"source\.max_train.*at least 4"):
        Arrays("a.npz", max_train=3).load(tmp_path)


@pytest.mark.parametrize(
    "replaced",
    [
        {"train_images": np.zeros((20, 6, 5, 3), np.float32)},
        {"train_labels": np.zeros(20, np.float32)},
        {"train_labels": np.zeros(19, np.int64)},
        {"test_images": np.zeros((8, 6), np.uint8)},
        {"test_images": np.zeros((8, 6, 6, 3), np.uint8)},
        {"test_labels": np.full(8, -1)},
        {"test_images": np.zeros((0, 6, 5, 3), np.uint8), "test_labels": np.zeros(0, np.int64)},
        {
            f"{part}_{kind}": np.zeros((0, 6, 5) if kind == "images" else 0, np.uint8)
            for part in ("train", "test")
            for kind in ("images", "labels")
        },
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, replaced):
    arrays_file(tmp_path / "a.npz", **replaced)
    with pytest.raises(DataFilesMissing):
        Arrays("a.npz").load(tmp_path)


def test_arrays_damaged_files(tmp_path):
    arrays_file(tmp_path / "a.npz")
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    flipped = bytearray(data)
    flipped[len(data) // 4] ^= 1  # inside the first array: zip's checksum finds it
    (tmp_path / "flipped.npz").write_bytes(bytes(flipped))
    np.savez(tmp_path / "keys.npz", train_images=np.zeros((2, 3, 3), np.uint8))
    np.savez(tmp_path / "objects.npz", **{k: np.array([{}]) for k in arrays_file(tmp_path / "b.npz")})
    for name, reason in (("cut", "cut off"), ("flipped", "CRC"), ("keys", "lacks test_images"), ("objects", "pickle")):
        with pytest.raises(DataFilesMissing, match=rf"{name}\.npz cannot be used.*{reason}"):
            Arrays(f"{name}.npz").load(tmp_path)
