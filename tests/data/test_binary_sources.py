"""Binary data: images made binary by a threshold, and binary data sets in each of their file formats."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import split, tiny_data

from cfl.data.sources import MNIST, Binarised, BinarySet, Digits, Synthetic
from cfl.data.sources.binary_sets import PARTS, VARIABLES, read_binary_text
from cfl.data.sources.split import merged_split
from cfl.data.streams import Sequence
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing

NOWHERE = Path("nowhere")
SIZES = {"train": 30, "valid": 6, "test": 13}


def bits(rows: int, variables: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, (rows, variables)).astype(np.uint8)


PUBLISHED = {part: bits(rows, seed=number) for number, (part, rows) in enumerate(SIZES.items())}


def text(rows: np.ndarray, between: str) -> str:
    return "".join(between.join(map(str, row)) + "\n" for row in rows.tolist())


def as_npz(folder: Path) -> None:
    np.savez(folder / "made-up.npz", **PUBLISHED)


def as_release(folder: Path) -> None:
    """The layout of MADE's own files: float arrays under other names, and single numbers beside them."""
    floats = {f"{part}_data": rows.astype(np.float32) for part, rows in PUBLISHED.items()}
    np.savez(folder / "made-up.npz", inputsize=5, train_length=30, **floats)


def as_commas(folder: Path) -> None:
    for part, rows in PUBLISHED.items():
        (folder / f"made-up.{part}.data").write_text(text(rows, ","))


def as_commas_in_a_folder(folder: Path) -> None:
    (folder / "made-up").mkdir()
    as_commas(folder / "made-up")


def as_blanks(folder: Path) -> None:
    for part, rows in PUBLISHED.items():
        (folder / f"made-up_{part}.amat").write_text(text(rows, " ").replace("\n", " \r\n") + "\n")


FORMATS: list[Callable[[Path], None]] = [as_npz, as_release, as_commas, as_commas_in_a_folder, as_blanks]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("place", ["binary", ""])
def test_every_format_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], None], place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    write(tmp_path / place)
    made = BinarySet("made-up", variables=5)
    assert (made.name, made.shape, made.num_classes) == ("made-up", (1, 1, 5), 1)
    for found, part in zip(made.load(tmp_path), ("train", "test"), strict=True):
        np.testing.assert_array_equal(found.images.view(-1, 5).numpy(), PUBLISHED[part])
        assert found.labels.tolist() == [0] * SIZES[part]
        x = made.transform()(found.images)
        assert x.dtype == torch.float32
        np.testing.assert_array_equal(x.view(-1, 5).numpy(), PUBLISHED[part])


def test_padding_is_behind(tmp_path: Path) -> None:
    as_npz(tmp_path)
    made = BinarySet("made-up", variables=5, pad_to=8)
    assert made.shape == (1, 1, 8)
    train, _ = made.load(tmp_path)
    np.testing.assert_array_equal(train.images.view(-1, 8)[:, :5].numpy(), PUBLISHED["train"])
    assert int(train.images.view(-1, 8)[:, 5:].max()) == 0


def test_merged_sets_are_cut_anew(tmp_path: Path) -> None:
    """Of 49 merged rows, 35 are for training and 7 for tests. No row is in both, and every run has the same rows."""
    whole = np.concatenate([np.eye(49, dtype=np.uint8)[start:stop] for start, stop in ((0, 30), (30, 36), (36, 49))])
    np.savez(tmp_path / "ones.npz", train=whole[:30], valid=whole[30:36], test=whole[36:])
    made = BinarySet("ones", variables=49, split="merged")
    train, test = made.load(tmp_path)
    numbers = [part.images.view(-1, 49).argmax(1).tolist() for part in (train, test)]
    assert [len(set(part)) for part in numbers] == [35, 7]
    assert not set(numbers[0]) & set(numbers[1])
    assert sorted(numbers[0]) == numbers[0] != list(range(35))
    assert [part.images.view(-1, 49).argmax(1).tolist() for part in made.load(tmp_path)] == numbers
    first = BinarySet("ones", variables=49, split="merged", max_rows=33)  # of training and validation rows alone
    numbers = [part.images.view(-1, 49).argmax(1).tolist() for part in first.load(tmp_path)]
    assert [len(part) for part in numbers] == [23, 4]
    assert max(max(part) for part in numbers) < 33


@pytest.mark.parametrize(
    ("rows", "train", "test"),
    [(32_561, 23_257, 4_651), (67_557, 48_255, 9_651), (29_387, 20_990, 4_198), (48_000, 34_285, 6_857)],
)
def test_published_sizes_of_merged_sets(rows: int, train: int, test: int) -> None:
    """Merged splits have the sizes of CONFEDMADE, Table 5: adult, connect4, tretail, rcv1."""
    whole = ImageSet(torch.zeros(rows, 1, 1, 1, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64))
    assert tuple(map(len, merged_split([whole], "test"))) == (train, test)


def test_merging_goes_class_by_class() -> None:
    images = torch.arange(100, dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = torch.arange(100) % 3  # 34, 33, 33
    parts = [ImageSet(images[:60], labels[:60]), ImageSet(images[60:], labels[60:])]
    train, test = merged_split(parts, "test")
    assert torch.bincount(train.labels).tolist() == [24, 23, 23]
    assert torch.bincount(test.labels).tolist() == [4, 4, 4]
    for part in (train, test):
        assert (part.images.flatten().long() % 3).tolist() == part.labels.tolist()
    assert not set(train.images.flatten().tolist()) & set(test.images.flatten().tolist())


def test_sets_of_one_width_make_a_stream(tmp_path: Path) -> None:
    as_npz(tmp_path)
    np.savez(tmp_path / "other.npz", train=bits(20, 7), test=bits(9, 7))
    stream = Sequence([BinarySet("made-up", 5, pad_to=8), BinarySet("other", 7, pad_to=8)])
    assert (stream.shape, stream.classes_per_task) == ((1, 1, 8), [1, 1])
    data = tiny_data(stream, scenario="density", root=str(tmp_path), num_clients=3)
    data.setup("fit")
    assert data.num_outputs == 8
    assert [len(task.train) for task in data.tasks] == [30, 20]
    assert data.outputs.train is None
    assert data.outputs.offsets == (0, 0)


def test_known_sets() -> None:
    assert BinarySet("rcv1").shape == (1, 1, 150)
    assert BinarySet("adult", pad_to=150).shape == (1, 1, 150)
    assert BinarySet("binarized_mnist").shape == (1, 28, 28)
    assert {"adult": 123, "connect4": 126, "tretail": 135}.items() <= VARIABLES.items()


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("set", {"set": "unheard-of"}),
        ("variables", {"set": "adult", "variables": 124}),
        ("variables", {"set": "unheard-of", "variables": 0}),
        ("pad_to", {"set": "adult", "pad_to": 122}),
        ("split", {"set": "adult", "split": "random"}),
        ("max_rows", {"set": "adult", "max_rows": 100}),
        ("max_rows", {"set": "adult", "max_rows": 6, "split": "merged"}),
    ],
)
def test_bad_options_of_sets(option: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        BinarySet(**options)
    assert caught.value.key == f"data.stream.source.{option}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0,1\n1,2\n", "something else"),
        (b"0,1\n1,11\n", "other than 0 and 1"),
        (b"0,1\n1\n", "differ in length"),
        (b"\n", "is empty"),
    ],
)
def test_text_that_is_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "some.train.data"
    file.write_bytes(content)
    with pytest.raises(DataFilesMissing, match=message):
        read_binary_text(file)


def test_the_last_line_may_be_open(tmp_path: Path) -> None:
    file = tmp_path / "some.train.data"
    file.write_bytes(b"0,1,1\n1,0,0")
    assert read_binary_text(file).tolist() == [[0, 1, 1], [1, 0, 0]]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataFilesMissing, match=r"adult\.train\.data"):
        BinarySet("adult").load(tmp_path)
    np.savez(tmp_path / "made-up.npz", valid=PUBLISHED["valid"], test=PUBLISHED["test"])
    with pytest.raises(DataFilesMissing, match="lack train; there is valid, test"):
        BinarySet("made-up", 5).load(tmp_path)
    np.savez(tmp_path / "made-up.npz", **PUBLISHED)
    with pytest.raises(DataFilesMissing, match="have 5 variables, not 6"):
        BinarySet("made-up", 6).load(tmp_path)
    np.savez(tmp_path / "made-up.npz", **{part: rows + 1 for part, rows in PUBLISHED.items()})
    with pytest.raises(DataFilesMissing, match=r"train is not \[N, D\] of 0 and 1"):
        BinarySet("made-up", 5).load(tmp_path)
    assert set(PARTS) == set(PUBLISHED)


# Images


def test_pixels_above_the_threshold_are_one() -> None:
    plain, made = Synthetic(3, [1, 4, 4], 30, 9), Binarised(Synthetic(3, [1, 4, 4], 30, 9), 100)
    assert (made.name, made.shape, made.num_classes) == ("binary-synthetic", (1, 4, 4), 3)
    for found, whole in zip(made.load(NOWHERE), plain.load(NOWHERE), strict=True):
        assert torch.equal(found.images, (whole.images >= 101).to(torch.uint8))
        assert torch.equal(found.labels, whole.labels)
        x = made.transform()(found.images)
        assert set(x.unique().tolist()) == {0.0, 1.0}
        assert torch.equal(x, found.images.float())


def test_the_default_is_half_of_white() -> None:
    """By default a pixel is 1 above half of white: from 128 for bytes, from 9 for scikit-learn's digits (0 to 16)."""
    images = torch.tensor([127, 128, 0, 255], dtype=torch.uint8).view(1, 1, 2, 2)

    class Four(Synthetic):
        def load(self, root: Path) -> tuple[ImageSet, ImageSet]:
            both = ImageSet(images, torch.zeros(1, dtype=torch.int64))
            return both, both

    assert Binarised(Four(1, [1, 2, 2])).load(NOWHERE)[0].images.flatten().tolist() == [0, 1, 0, 1]
    digits, whole = Binarised(Digits()).load(NOWHERE)[0], Digits().load(NOWHERE)[0]
    assert torch.equal(digits.images == 1, whole.images > 8)


def test_pixels_may_be_drawn() -> None:
    """With ``drawn``, a pixel is 1 with probability value / scale. Every run repeats the draws."""
    source = Synthetic(3, [1, 4, 4], 3000, 3000)
    grey, drawn = source.load(NOWHERE), Binarised(source, drawn=True).load(NOWHERE)
    for plain, bits in zip(grey, drawn, strict=True):
        assert set(bits.images.flatten().tolist()) == {0, 1}
        assert torch.equal(bits.labels, plain.labels)
        expected = (plain.images.double() / source.scale).mean(0)
        # The deviation of a mean of 3000 bits is 0.009 at most.
        assert float((bits.images.double().mean(0) - expected).abs().max()) < 0.045
        close = (plain.images.double() / source.scale - 0.5).abs() < 0.1
        # Among pixels near one half, the share of ones is the mean of their values.
        share = bits.images[close].double().mean()
        assert float(share) == pytest.approx(float(plain.images[close].double().mean() / source.scale), abs=0.03)
        assert bool((bits.images[plain.images == 0] == 0).all())
        above = plain.images[close].double() / source.scale > 0.5
        assert 0.3 < float((bits.images[close] != above).double().mean()) < 0.5  # a threshold would have none
    again = Binarised(Synthetic(3, [1, 4, 4], 3000, 3000), drawn=True)
    assert torch.equal(again.load(NOWHERE)[0].images, drawn[0].images)
    assert again.name == f"drawn-{source.name}"


def test_merged_images_are_cut_class_by_class() -> None:
    parts = Binarised(Digits(), split="merged").load(NOWHERE)
    whole = torch.bincount(torch.cat([part.labels for part in Digits().load(NOWHERE)]))
    assert [torch.bincount(part.labels).tolist() for part in parts] == [
        [int(n) * 5 // 7 for n in whole],
        [int(n) // 7 for n in whole],
    ]


def test_merged_samples_without_classes_are_cut_as_one_class() -> None:
    images = torch.arange(14, dtype=torch.uint8).view(14, 1, 1, 1)
    for labels in (torch.rand(14, 2), torch.zeros(14, 3, 5)):
        found = merged_split([ImageSet(images[:9], labels[:9]), ImageSet(images[9:], labels[9:])], "cut")
        assert [len(part) for part in found] == [10, 2]
        for part in found:
            assert torch.equal(part.labels, labels[part.images.flatten().long()])


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("threshold", {"threshold": 16}),
        ("threshold", {"threshold": -1}),
        ("threshold", {"threshold": 3, "drawn": True}),
        ("split", {"split": "x"}),
    ],
)
def test_bad_options_of_images(option: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Binarised(Digits(), **options)
    assert caught.value.key == f"data.stream.source.{option}"


def test_only_binary_data_have_a_density() -> None:
    data = tiny_data(split(), scenario="density")
    with pytest.raises(ConfigError, match="binary data sets"):
        data.setup("fit")


def test_mnist_at_the_published_threshold(data_root: Path) -> None:
    """Pixels agree with the file's bytes. CONFEDMADE trains on 5,626 of the 7,877 images of a one (Table 5)."""
    train, test = Binarised(MNIST()).load(data_root)
    assert (len(train), len(test)) == (60_000, 10_000)
    file = data_root / "MNIST/raw/train-images-idx3-ubyte"
    content = file.read_bytes() if file.exists() else gzip.decompress(file.with_suffix(".gz").read_bytes())
    raw = np.frombuffer(content[16:], dtype=np.uint8)
    np.testing.assert_array_equal(train.images.flatten().numpy() == 1, raw > 127)
    train, test = Binarised(MNIST(), 127, "merged").load(data_root)
    assert int(torch.bincount(train.labels)[1]) == 5_626
    assert abs(len(train) - 50_000) < 10
    assert abs(len(test) - 10_000) < 10
