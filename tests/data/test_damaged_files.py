"""Data files that hold less than they claim: refused by name, before memory of the claimed size is allocated."""

from __future__ import annotations

import gzip
import io
import logging
import os
import shutil
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cfl.data.sources import Arrays, BinarySet, ImageFolder, NotMNIST, TinyImageNet, YahooAnswers, data_root, npz
from cfl.data.sources import notmnist as notmnist_module
from cfl.data.sources.idx import check_idx_size
from cfl.data.sources.npy_images import read_npy_images
from cfl.data.sources.split import stratified_split
from cfl.data.types import ImageSet
from cfl.data.yahoo_csv import questions
from cfl.runtime.errors import ConfigError, DataFilesMissing

ALLOCATED = 30 << 20
"""Bytes of memory that reading any of these small files may take at most."""


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ALLOCATED
    finally:
        tracemalloc.stop()


class Marker:
    """An object that would make a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# --- arrays -----------------------------------------------------------------------------------------------------


def content(**replaced: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, n in (("train", 20), ("test", 8)):
        found[f"{part}_images"] = np.random.default_rng(n).integers(0, 256, (n, 4, 4), dtype=np.uint8)
        found[f"{part}_labels"] = np.arange(n) % 4
    return found | replaced


def header(shape: Any, descr: str = "|u1") -> bytes:
    """The beginning of an .npy file by its published description, version 1.0."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}) if not isinstance(shape, str) else shape
    padded = text.encode() + b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded


def archive(path: Path, method: int = zipfile.ZIP_DEFLATED, **replaced: Any) -> Path:
    """Write an ``.npz`` file of images and labels, some of them replaced."""
    return pack(path, content(**replaced), method)


def pack(path: Path, values: dict[str, Any], method: int = zipfile.ZIP_STORED) -> Path:
    """Write an ``.npz`` file of arrays, or of raw bytes in the place of an array."""
    with zipfile.ZipFile(path, "w", method) as packed:
        for key, value in values.items():
            stream = io.BytesIO()
            if isinstance(value, bytes):
                stream.write(value)
            else:
                np.save(stream, value)
            packed.writestr(f"{key}.npy", stream.getvalue())
    return path


def repeated(values: list[Any], count: int = 20, dtype: Any = None) -> np.ndarray:
    return np.array((values * count)[:count], dtype=dtype)


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "label of 10^9": (
        {"train_labels": repeated([0, 1, 2, 10**9])},
        "999,999,997 of its labels 0 to 1000000000 have no training sample, the first is 3[.]",
    ),
    "gaps": (
        {"train_labels": repeated([0, 10, 20]), "test_labels": repeated([0, 10, 20], 8)},
        r"18 of its labels 0 to 20 have no training sample, the first is 1[.]",
    ),
    "from 1": (
        {"train_labels": repeated([1, 2]), "test_labels": repeated([1, 2], 8)},
        r"the first is 0 \(data\.stream\.source\.num_classes: 3 says that this is meant\)",
    ),
    "a class for tests alone": (
        {"test_labels": repeated([0, 4], 8)},
        "1 of its labels 0 to 4 .* first is 4, and 4 is a label of tests alone",
    ),
    "unsigned above 2^63": (
        {"train_labels": repeated([0, 2**63 + 5], dtype=np.uint64)},
        r"train_labels run from 0 to 9223372036854775813; valid: integers from 0, below 2\^63",
    ),
    "negative": ({"test_labels": repeated([0, -3], 8)}, "test_labels run from -3 to 0; valid: integers"),
    "float labels": ({"train_labels": repeated([0.0, np.nan])}, "train_labels float64"),
    "text labels": ({"train_labels": repeated(["a"])}, "train_labels <U1"),
    "dates": ({"train_labels": np.zeros(20, dtype="M8[s]")}, "train_labels datetime64"),
    "records": ({"train_labels": np.zeros(20, dtype=[("a", "i4")])}, "train_labels .*'a', '<i4'"),
    "labels in a column": ({"train_labels": np.zeros((20, 1), int)}, r"train_images are \[20, 4, 4\], .* \[20, 1\]"),
    "another number of labels": ({"train_labels": np.zeros(19, int)}, r"\[20, 4, 4\], train_labels \[19\]"),
    "NaN images": ({"train_images": np.full((20, 4, 4), np.nan)}, "train_images are float64"),
    "images of another size": ({"test_images": np.zeros((8, 5, 5), np.uint8)}, r"train image is \[4, 4\], a test .*5"),
    "flat images": ({"train_images": np.zeros((20, 16), np.uint8)}, r"train_images are \[20, 16\]"),
    "no image": ({"test_images": np.zeros((0, 4, 4), np.uint8), "test_labels": np.zeros(0, int)}, "test set is empty"),
    "images without pixels": ({"train_images": np.zeros((20, 0, 4), np.uint8)}, "train set is empty"),
    "58 TiB of images": (
        {"train_images": header((4 * 10**12, 4, 4)) + b"x" * 99},
        r"uint8 \[4000000000000, 4, 4\] by its header, which takes 64,000,000,000,000 bytes, but 99 are stored",
    ),
    "58 TiB of labels": ({"train_labels": header((8 * 10**12,), "<i8") + b"x" * 99}, "64,000,000,000,000 bytes"),
    "more than 64 bits can count": ({"train_images": header((2**70, 4, 4)) + b"x"}, "but 1 are stored"),
    "a negative number": ({"train_images": header((-1, 4, 4)) + b"x"}, r"uint8 \[-1, 4, 4\]"),
    "an image of terapixels": ({"train_images": header((20, 10**6, 10**6)) + b"x"}, "but 1 are stored"),
    "words of 2 GiB": ({"train_images": header((20, 4, 4), "|S2147483647") + b"x"}, "but 1 are stored"),
    "more than its header says": ({"train_images": header((20, 4, 4)) + b"x" * 999}, "takes 320 bytes, but 999"),
    "less than its header says": ({"train_images": header((20, 4, 4)) + b"x" * 99}, "takes 320 bytes, but 99"),
    "a header of 9,000 signs": ({"train_images": header("-" * 9000 + "1")}, "train_images has no header of numpy's"),
    "a header that is code": ({"train_images": header("print(1)")}, "train_images has no header of numpy's"),
    "something else": ({"test_images": b"no array"}, "test_images has no header of numpy's"),
    "nothing": ({"test_labels": b""}, "test_labels has no header of numpy's"),
}


@pytest.mark.parametrize(("replaced", "message"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_refused_by_name(
    replaced: dict[str, Any], message: str, tmp_path: Path, little_memory: None
) -> None:
    """Bad arrays are refused both when the classes are counted, before a network is built, and when they are loaded."""
    path = archive(tmp_path / "mine.npz", **replaced)
    for use in (lambda: Arrays(str(path)).num_classes, lambda: Arrays("mine.npz").load(tmp_path)):
        with pytest.raises(DataFilesMissing, match=rf"mine\.npz cannot be used: .*{message}"):
            use()


def test_pickles_in_arrays_are_not_read(tmp_path: Path) -> None:
    objects = np.empty(20, dtype=object)
    objects[:] = [Marker(tmp_path / "made")] * 20
    for key in ("train_images", "train_labels"):
        np.savez(tmp_path / "mine.npz", **content(**{key: objects}))
        with pytest.raises(DataFilesMissing, match=rf"{key} holds Python objects, .* pickles are not read"):
            Arrays("mine.npz").load(tmp_path)
    assert not (tmp_path / "made").exists()


def damaged(data: bytes, at: float) -> bytes:
    place = int(at * len(data))
    return data[:place] + bytes(byte ^ 0x55 for byte in data[place : place + 8]) + data[place + 8 :]


@pytest.mark.parametrize("at", np.linspace(0.01, 0.99, 15).round(3))
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("damage", [damaged, lambda data, at: data[: int(at * len(data))]], ids=["changed", "cut"])
def test_damaged_archives_are_refused_or_hold_the_same(
    damage: Callable[[bytes, float], bytes], save: Callable[..., None], at: float, tmp_path: Path
) -> None:
    """A damaged archive is refused or gives the same arrays: some bytes, such as dates, have no effect."""
    path = tmp_path / "mine.npz"
    save(path, **content())
    before, whole = Arrays("mine.npz").load(tmp_path), path.read_bytes()
    path.write_bytes(damage(whole, float(at)))
    try:
        found = Arrays("mine.npz").load(tmp_path)
    except DataFilesMissing:
        return
    assert len(path.read_bytes()) == len(whole)
    assert all(torch.equal(x.images, y.images) for x, y in zip(before, found, strict=True))
    assert all(torch.equal(x.labels, y.labels) for x, y in zip(before, found, strict=True))


def set_in_headers(data: bytes, local: int, central: int, value: bytes) -> bytes:
    """Overwrite a field in all file headers of an archive, given its offset in local and in central headers."""
    changed = bytearray(data)
    for sign, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = data.find(sign)
        while at >= 0:
            changed[at + offset : at + offset + len(value)] = value
            at = data.find(sign, at + 1)
    return bytes(changed)


@pytest.mark.parametrize(
    ("field", "message"),
    [((6, 8, b"\x01"), "is encrypted"), ((8, 10, b"\x61"), "not supported"), ((22, 24, b"\xf0\xff\xff\xff"), "stored")],
    ids=["encrypted", "of another compression", "of 4 GiB by its directory"],
)
def test_archives_of_another_kind_are_refused(
    field: tuple[int, int, bytes], message: str, tmp_path: Path, little_memory: None
) -> None:
    path = archive(tmp_path / "mine.npz", zipfile.ZIP_STORED)
    path.write_bytes(set_in_headers(path.read_bytes(), *field))
    with pytest.raises(DataFilesMissing, match=rf"mine\.npz cannot be used: .*{message}"):
        Arrays("mine.npz").load(tmp_path)


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "mine.npz")
    with zipfile.ZipFile(path, "a") as packed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed.writestr("train_labels.npy", packed.read("train_labels.npy"))
    with pytest.raises(DataFilesMissing, match="it holds train_labels 2 times"):
        Arrays("mine.npz").load(tmp_path)


def test_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little_memory: None) -> None:
    count = (32 << 20) // 16
    bomb = {"train_images": header((count, 4, 4)) + bytes(16 * count), "train_labels": np.zeros(count, np.uint8)}
    path = archive(tmp_path / "mine.npz", **bomb)
    del bomb
    tracemalloc.reset_peak()
    monkeypatch.setattr(npz, "_SMALL", 1 << 20)
    with pytest.raises(DataFilesMissing, match=r"train_images would unpack from [\d,]+ to 33,554,560 bytes"):
        Arrays(str(path)).load(tmp_path)


def test_what_looks_odd_and_is_meant_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other byte orders and memory layouts are read. With ``num_classes``, classes without samples are warned of."""
    odd = content(train_labels=repeated([0, 3], dtype=">i2"), test_labels=repeated([0, 5], 8, np.uint64))
    odd["train_images"] = np.asfortranarray(odd["train_images"])
    np.savez(tmp_path / "mine.npz", **odd)
    with caplog.at_level(logging.WARNING):
        train, test = Arrays("mine.npz", num_classes=6).load(tmp_path)
    np.testing.assert_array_equal(train.images[:, 0].numpy(), odd["train_images"])
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 3] * 10, [0, 5] * 4)
    assert [record.getMessage() for record in caplog.records] == [
        "mine: 4 of 6 classes have no training sample, first 1",
        "mine: 4 of 6 classes have no test sample, first 1",
    ]


def test_a_class_without_test_samples_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive(tmp_path / "mine.npz", test_labels=repeated([0, 1, 2], 8))
    with caplog.at_level(logging.WARNING):
        assert Arrays("mine.npz").load(tmp_path)[1].labels.max() == 2
    assert "mine: 1 of 4 classes have no test sample, first 3" in caplog.text


LONG = "n" * 300


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: Arrays(f"{LONG}.npz").num_classes, "path = 'nnn.*does not exist"),
        (lambda: Arrays(f"{LONG}.npz", [1, 4, 4], 4).load(Path()), "nnn.* is missing"),
        (lambda: ImageFolder(LONG, [1, 4, 4]).num_classes, "path = .nnn.*does not exist"),
        (lambda: ImageFolder(LONG, [1, 4, 4], 2).load(Path()), "nnn.*: missing"),
        (lambda: ImageFolder("a\0b", [1, 4, 4], 2).load(Path()), "missing"),
        (lambda: BinarySet(LONG, 3).load(Path()), "expected .*nnn"),
        (lambda: YahooAnswers(LONG).load(Path()), "nnn.*missing"),
        (lambda: data_root(LONG), r"data\.root = 'nnn.*valid: the path of a folder \(File name too long\)"),
    ],
)
def test_names_that_no_file_can_have_are_named(source: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigError, DataFilesMissing), match=f"(?s){message}"):
        source()


# --- image files ------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, more: bytes = b"") -> bytes:
    """A PNG file whose header announces that size, with the pixels of a small image."""
    size = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + size + more + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def stored(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def tree(root: Path) -> Path:
    """Write folders ``cat`` and ``dog`` with two training images and one test image each."""
    for part, count in (("train", 2), ("test", 1)):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (9 * i, 0, 0)).save(root / part / name / f"{i}.png")
    return root


noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
IMAGES: dict[str, tuple[str, bytes, str]] = {
    "14,000 x 14,000": ("x.png", png(14_000, 14_000), "exceeds limit of 178956970 pixels"),
    "2^31 x 2^31": ("x.png", png(2**31 - 1, 2**31 - 1), "exceeds limit"),
    "no pixels": ("x.png", png(0, 0), "cannot identify"),
    "pixels that are missing": ("x.png", png(5000, 5000), "truncated"),
    "a comment of 64 MiB": (
        "x.png",
        png(4, 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20), 1))),
        "Decompressed data too large",
    ),
    "an empty file": ("x.png", b"", "cannot identify"),
    "text": ("x.jpg", b"hello", "cannot identify"),
    **{
        f"{kind} cut at {share}": (f"x.{ending}", stored(noise, kind)[: int(share * len(stored(noise, kind)))], ".")
        for kind, ending in (("PNG", "png"), ("JPEG", "jpg"), ("BMP", "bmp"), ("TIFF", "tif"), ("WEBP", "webp"))
        for share in (0.02, 0.5, 0.97)
    },
    "a size that is no number": ("x.ppm", b"P6\n4\xff 4\n255\n" + bytes(48), "."),
    "16 bits": ("x.png", stored(Image.fromarray(np.full((4, 4), 1000, np.uint16)), "PNG"), "values, 1000 to 1000"),
    "32 bits": ("x.tif", stored(Image.fromarray(np.full((4, 4), -7, np.int32)), "TIFF"), "values, -7 to -7"),
    "floats": ("x.tif", stored(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF"), "values, 0.5 to 0.5"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on what it leaves out of a damaged header
@pytest.mark.parametrize(("name", "data", "message"), IMAGES.values(), ids=IMAGES)
def test_images_are_refused_by_name(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tree(tmp_path / "pets") / "train" / "cat" / name).write_bytes(data)
    with pytest.raises(DataFilesMissing) as caught:
        ImageFolder("pets", [3, 4, 4]).load(tmp_path)
    assert f"pets/train/cat/{name} cannot be read as an image: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_images_of_other_modes_are_converted(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    image.save(tree(tmp_path / "pets") / "train" / "cat" / ("x.jpg" if mode in ("CMYK", "YCbCr") else "x.png"))
    train, _ = ImageFolder("pets", [3, 4, 4]).load(tmp_path)
    assert train.images[2].min() >= 254, "white, as the third image of cats"


def test_sixteen_bits_that_eight_can_hold_are_read(tmp_path: Path) -> None:
    image = Image.fromarray(np.full((4, 4), 200, np.uint16))
    image.save(tree(tmp_path / "pets") / "train" / "cat" / "x.png")
    assert ImageFolder("pets", [1, 4, 4]).load(tmp_path)[0].images[2].tolist() == [[[200] * 4] * 4]


def linked_twice(root: Path) -> None:
    for part in ("train", "test"):
        (root / part / "fox").symlink_to("cat")


def linked_both_ways(root: Path) -> None:
    (root / "others").mkdir()
    (root / "train" / "cat" / "others").symlink_to(root / "others")
    (root / "others" / "back").symlink_to(root / "train" / "cat")


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a link to itself": (lambda root: (root / "train/cat/x").symlink_to("."), "train/cat/x .*same folder as .*cat"),
    "a link to the root": (lambda root: (root / "train/cat/x").symlink_to("/"), "train/cat/x .*same folder as /"),
    "links in a circle": (linked_both_ways, "others/back cannot be used: .*same folder as .*train/cat"),
    "one class twice": (linked_twice, "fox cannot be used: a symbolic link makes it the same folder as .*cat"),
    "a link to nowhere": (lambda root: (root / "train/cat/x.png").symlink_to("y.png"), "x.png .*there is no such file"),
    "a pipe": (lambda root: os.mkfifo(root / "train/cat/x.png"), "x.png .*there is no such file"),
    "a class without images": (
        lambda root: [(root / part / "fox").mkdir() for part in ("train", "test")],
        r"train/fox cannot be used: it holds no image \(\*\.jpg",
    ),
    "tests on the training images": (
        lambda root: [(root / "test").rename(root / "t"), (root / "test").symlink_to("train")],
        "pets: train and test are the same folder",
    ),
    "a damaged image in a folder of two lines": (
        lambda root: (
            [shutil.copytree(root / part / "cat", root / part / "a\nb") for part in ("train", "test")]
            and (root / "train" / "a\nb" / "1.png").write_bytes(b"")
        ),
        "train/a\nb/1.png cannot be read",
    ),
}


@pytest.mark.parametrize(("change", "message"), FOLDERS.values(), ids=FOLDERS)
def test_folders_are_refused_by_name(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    change(tree(tmp_path / "pets"))
    with pytest.raises(DataFilesMissing, match=message):
        ImageFolder("pets", [3, 4, 4]).load(tmp_path)


def test_a_folder_without_classes_is_refused_before_a_network_is_built(tmp_path: Path) -> None:
    (tmp_path / "pets" / "train").mkdir(parents=True)
    with pytest.raises(DataFilesMissing, match="pets/train cannot be used: it holds no folders, one for each class"):
        _ = ImageFolder(str(tmp_path / "pets"), [3, 4, 4]).num_classes


def test_images_are_in_the_order_of_folders_then_names(tmp_path: Path) -> None:
    """Images are found in torchvision's order. Other files are left out, and so are folders with an image's name."""
    root = tree(tmp_path / "pets") / "train" / "cat"
    for name in ("b/9.PNG", "a/2.png", "a/10.png", "c.png/3.jpeg"):
        (root / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (0, 0, 50)).save(root / name, "PNG")
    (root / "a" / "notes.txt").write_text("hello")
    from torchvision import datasets

    from cfl.data.sources.images import class_images

    found = [(str(path), label) for path, label in class_images(tmp_path / "pets" / "train")]
    assert found == datasets.ImageFolder(str(tmp_path / "pets" / "train")).samples
    assert len(found) == 8


# --- idx, notMNIST, arrays of single files, binary sets, texts ------------------------------------------------


def write_idx(path: Path, shape: tuple[int, ...], data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data
    path.write_bytes(gzip.compress(whole, 1) if path.suffix == ".gz" else whole)
    return path


def idx_files(root: Path, suffix: str = "") -> Path:
    """notMNIST's four files; returns that of the training images."""
    for part in ("t10k", "train"):
        write_idx(root / "notMNIST" / "raw" / f"{part}-labels-idx1-ubyte{suffix}", (10,), bytes(range(10)))
        images = write_idx(root / "notMNIST" / "raw" / f"{part}-images-idx3-ubyte{suffix}", (10, 28, 28), bytes(7840))
    return images


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(2**32 - 1,) * 3, (2**31, 2**31, 4), (9, 28, 28), (11, 28, 28)])
def test_idx_files_of_another_size_are_refused(
    shape: tuple[int, ...], suffix: str, tmp_path: Path, little_memory: None
) -> None:
    """Idx files with another number of values than announced are refused.

    The second shape would have 0 values if products were taken modulo 2^64.
    """
    file = write_idx(idx_files(tmp_path, suffix), shape, bytes(7840))
    with pytest.raises(
        DataFilesMissing, match=rf"{file.name} is damaged: its header announces [\d,]+ values, it holds"
    ):
        NotMNIST().load(tmp_path)
    if not suffix:
        with pytest.raises(ValueError, match="its header announces"):
            check_idx_size(file)


def test_packed_idx_files_are_not_unpacked_beyond_what_they_announce(tmp_path: Path, little_memory: None) -> None:
    file = idx_files(tmp_path, ".gz")
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(bytes([0, 0, 8, 3]) + struct.pack(">III", 10, 28, 28))
        for _ in range(64):
            stream.write(bytes(1 << 20))
    with pytest.raises(DataFilesMissing, match="announces 7,840 values, it holds more"):
        NotMNIST().load(tmp_path)


@pytest.mark.parametrize("at", np.linspace(0.02, 0.98, 9).round(2))
def test_damaged_packed_idx_files_are_refused(at: float, tmp_path: Path) -> None:
    file = idx_files(tmp_path, ".gz")
    noise = np.random.default_rng(0).bytes(7840)
    write_idx(file, (10, 28, 28), noise)
    file.write_bytes(damaged(file.read_bytes(), float(at)))
    with pytest.raises(DataFilesMissing, match="NotMNIST cannot be read from"):
        NotMNIST().load(tmp_path)


def letters(root: Path, names: str = "ABCDEFGHIJ", count: int = 10) -> None:
    for k, name in enumerate(names):
        (root / "notMNIST_small" / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (28, 28), 20 * k + i).save(root / "notMNIST_small" / name / f"{i}.png")


@pytest.mark.parametrize(
    ("names", "count", "message"),
    [
        ("ABCDEFGHI", 10, "notmnist: 1 of 10 classes have no training sample, first 9: these are not this data set's"),
        (
            "ABCDEFGHIJ",
            1,
            "notmnist: 10 samples of 10 classes cannot be split into a training set and a test set",
        ),
        ("ABCDEFGHIJ", 3, "notmnist: 30 samples of 10 classes cannot be split"),
    ],
)
def test_too_few_letters_are_refused(names: str, count: int, message: str, tmp_path: Path) -> None:
    letters(tmp_path, names, count)
    with pytest.raises(DataFilesMissing, match=message):
        NotMNIST().load(tmp_path)


def test_an_archive_that_unpacks_to_more_than_letters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notmnist_module, "_MOST_UNPACKED", 1 << 16)
    for sizes in ([1 << 17], [0] * 200):  # one large file, many empty ones
        with tarfile.open(tmp_path / "notMNIST_small.tar.gz", "w:gz") as packed:
            for k, size in enumerate(sizes):
                member = tarfile.TarInfo(f"notMNIST_small/A/{k}.png")
                member.size = size
                packed.addfile(member, io.BytesIO(bytes(size)))
        with pytest.raises(DataFilesMissing, match="cannot be unpacked: it holds more than 65,536 bytes"):
            NotMNIST().load(tmp_path)


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("{out}/file", tarfile.REGTYPE, ""),
        ("notMNIST_small/../out/file", tarfile.REGTYPE, ""),
        ("notMNIST_small/A", tarfile.SYMTYPE, "{out}"),
        ("notMNIST_small/A", tarfile.SYMTYPE, "."),
        ("notMNIST_small/A", tarfile.LNKTYPE, "{out}/other"),
        ("notMNIST_small/A", tarfile.FIFOTYPE, ""),
    ],
)
def test_an_archive_holds_files_and_folders_within_it_only(
    name: str, kind: bytes, link: str, filtered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has a filter of its own from 3.11.4 on."""
    if not filtered:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    out = tmp_path / "out"
    out.mkdir()
    with tarfile.open(tmp_path / "notMNIST_small.tar.gz", "w:gz") as packed:
        member = tarfile.TarInfo(name.format(out=out))
        member.type, member.linkname = kind, link.format(out=out)
        member.size = 3 if kind == tarfile.REGTYPE else 0
        packed.addfile(member, io.BytesIO(b"abc"))
        through = tarfile.TarInfo("notMNIST_small/A/through")
        through.size = 3
        packed.addfile(through, io.BytesIO(b"abc"))
    with pytest.raises(DataFilesMissing, match=r"notMNIST_small\.tar\.gz cannot be unpacked: .* is no file or folder"):
        NotMNIST().load(tmp_path)
    assert not list(out.iterdir())


def test_a_split_needs_samples() -> None:
    nothing = ImageSet(torch.zeros(0, 1, 2, 2, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(DataFilesMissing, match="mine: 0 samples of 0 classes cannot be split"):
        stratified_split("mine", nothing, 0.1)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (header((2**40, 4, 4, 3)) + b"x", None, "x.npy is damaged"),
        (header((2**70, 4, 4, 3)) + b"x", None, "x.npy is damaged"),
        (header((-1, 4, 4, 3)) + b"x", None, "x.npy is damaged"),
        (b"no array", None, "x.npy cannot be used: it is damaged"),
        (None, np.array([0, 2**63 + 1], np.uint64), "y.npy cannot be used: labels run from 0 to 9223372036854775809"),
        (None, np.array([0, -1]), "y.npy cannot be used: labels run from -1 to 0"),
    ],
)
def test_single_arrays_are_refused_by_name(
    images: bytes | None, labels: np.ndarray | None, message: str, tmp_path: Path, little_memory: None
) -> None:
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.zeros((2, 4, 4, 3), np.uint8))
    np.save(y, np.array([0, 1]) if labels is None else labels)
    if images is not None:
        x.write_bytes(images)
    with pytest.raises(DataFilesMissing, match=message) as caught:
        read_npy_images("Small", x, y, 4)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((6, 3), dtype=[("a", "u1")]), "train is not .N, D. of 0 and 1"),
        (np.full((6, 3), np.nan), "train is not"),
        (np.full((6, 3), "1"), "train is not"),
        (header((2**40, 3)) + b"x", "cannot be read: train is uint8"),
    ],
)
def test_binary_sets_are_refused_by_name(rows: Any, message: str, tmp_path: Path, little_memory: None) -> None:
    pack(tmp_path / "mine.npz", {"train": rows, "test": np.zeros((6, 3))})
    with pytest.raises(DataFilesMissing, match=rf"mine\.npz.*{message}"):
        BinarySet("mine", 3).load(tmp_path)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"labels": np.arange(20) % 10 + 0.5}, r"labels are float64 \[20\], not integers"),
        ({"labels": np.full(20, "1")}, "labels are <U1"),
        ({"labels": np.full(20, 2**63, np.uint64)}, "labels run from 9223372036854775808"),
        ({"features": header((2**36, 8), "<f4") + b"x"}, "features is float32"),
    ],
)
def test_features_of_texts_are_refused_by_name(
    replaced: dict[str, Any], message: str, tmp_path: Path, little_memory: None
) -> None:
    (tmp_path / "yahoo_answers_csv").mkdir()
    for part in ("train", "test"):
        values = {"features": np.zeros((20, 8), np.float32), "labels": np.arange(20) % 10} | replaced
        pack(tmp_path / "yahoo_answers_csv" / f"{part}.mine.npz", values)
    with pytest.raises(DataFilesMissing, match=rf"train\.mine\.npz is damaged, .*{message}"):
        YahooAnswers("mine", 8).load(tmp_path)


GOOD = b'"1","a","b","c"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (GOOD + b'"2","\xff","b","c"\n', "no CSV file in UTF-8"),
        (GOOD + b'"2","a","b","' + b"x" * (2**24 + 9), "no CSV file in UTF-8 .field larger than field limit"),
        (GOOD + '"²","a","b","c"\n'.encode(), "line 2: expected a topic from 1 to 10"),
        (GOOD + b'"' + b"1" * 5000 + b'","a","b","c"\n', "line 2: expected a topic from 1 to 10"),
        (GOOD + b'"2","a"\n', "line 2: .*found 2 fields"),
    ],
)
def test_tables_of_texts_are_refused_by_line(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(text)
    with pytest.raises(DataFilesMissing, match=rf"train\.csv.*{message}"):
        list(questions(tmp_path / "train.csv"))


@pytest.mark.parametrize("file", ["wnids.txt", "val/val_annotations.txt"])
def test_lists_that_are_no_text_are_refused_by_name(file: str, tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    names = [f"n{k:08}" for k in range(200)]
    for name in names:
        (root / "train" / name).mkdir(parents=True)
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(names))
    (root / "val" / "val_annotations.txt").write_text("")
    (root / file).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataFilesMissing, match=rf"{file} cannot be read as text"):
        TinyImageNet().load(tmp_path)
    if file == "wnids.txt":
        (root / file).write_text("\n".join([*names[1:], "n" * 300]))
        with pytest.raises(DataFilesMissing, match=r"train lacks 1 classes of wnids\.txt, e\.g\. 'nnn"):
            TinyImageNet().load(tmp_path)
