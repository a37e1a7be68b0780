"""Sources: facts about the real files, and the messages about absent, damaged or unsuitable files."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonargparse
import numpy as np
import pytest
import torch
from PIL import Image

import cfl.data.sources as sources
from cfl.data.sources import (
    CIFAR10,
    CIFAR100,
    KMNIST,
    MNIST,
    SVHN,
    USPS,
    Arrays,
    Binarised,
    Digits,
    EMNISTLetters,
    FashionMNIST,
    ImageFolder,
    MiniImageNet,
    NotMNIST,
    Source,
    Synthetic,
    TinyImageNet,
    YahooAnswers,
)
from cfl.data.sources import (
    data_root as resolve_root,
)
from cfl.data.sources.split import balanced_subset, stratified_split
from cfl.data.streams import Permuted, Sequence
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError, DataFilesMissing

FIXED = [Digits, MNIST, FashionMNIST, EMNISTLetters, KMNIST, CIFAR10, CIFAR100, SVHN, NotMNIST, USPS]
FIXED += [MiniImageNet, TinyImageNet, YahooAnswers]
DOWNLOADED = [MNIST, FashionMNIST, EMNISTLetters, KMNIST, CIFAR10, CIFAR100, SVHN, USPS]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def real(data_root: Path) -> Callable[[type[Source], str], tuple[ImageSet, ImageSet]]:
    """Load a real data set once, or skip the test if its files are not below the data root."""
    loaded: dict[str, tuple[ImageSet, ImageSet]] = {}

    def load(source: type[Source], file: str) -> tuple[ImageSet, ImageSet]:
        if not (data_root / file).exists():
            pytest.skip(f"needs {data_root / file}")
        if source.__name__ not in loaded:
            loaded[source.__name__] = source().load(data_root)
        return loaded[source.__name__]

    return load


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write an idx file by its published description: magic number, big-endian sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def small_mnist(raw: Path, suffix: str = "", parts: tuple[str, ...] = ("train", "t10k")) -> dict[str, np.ndarray]:
    """Write MNIST's four files, 30 random images in each part. Returns the arrays written."""
    written = {}
    for seed, part in enumerate(parts):
        images = np.random.default_rng(seed).integers(0, 256, (30, 28, 28), dtype=np.uint8)
        labels = np.arange(30, dtype=np.uint8) % 10
        write_idx(raw / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte{suffix}", labels)
        written |= {f"{part} images": images, f"{part} labels": labels}
    return written


def own_statistics(images: torch.Tensor, scale: float) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel from the 256 counts of each value, in float64."""
    means, stds = [], []
    for c in range(images.shape[1]):
        counts = np.bincount(images[:, c].numpy().ravel(), minlength=256).astype(np.float64)
        values = np.arange(256) / scale
        mean = (counts * values).sum() / counts.sum()
        means.append(mean)
        stds.append(float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum())))
    return means, stds


# --- real files -------------------------------------------------------------------------------------------------


def test_mnist_facts(real):
    train, test = real(MNIST, "MNIST/raw")
    assert train.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert torch.bincount(train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # the well-known first row with ink of the first training image, a five
    assert train.images[0, 0, 5, 12:24].tolist() == [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127]
    assert train.images[0, 0, :5].sum() == 0


@pytest.mark.parametrize(
    ("source", "file"), [(MNIST, "MNIST/raw"), (FashionMNIST, "FashionMNIST/raw"), (USPS, "usps.npz")]
)
def test_default_normalisation_is_that_of_the_training_pixels(real, source, file):
    train, _ = real(source, file)
    mean, std = own_statistics(train.images, 255.0)
    assert [round(m, 4) for m in mean] == list(source.mean)
    assert [round(s, 4) for s in std] == list(source.std)


def test_five_datasets_constants_are_those_of_padded_images(real):
    """FOT's 5-Datasets constants of MNIST and Fashion-MNIST are those of images padded with 2 black pixels."""
    for source, expected in ((MNIST, (0.1, 0.2752)), (FashionMNIST, (0.2190, 0.3318))):
        train, _ = real(source, f"{source.__name__}/raw")
        mean, std = own_statistics(torch.nn.functional.pad(train.images, (2, 2, 2, 2)), 255.0)
        assert (round(mean[0], 4), round(std[0], 4)) == pytest.approx(expected, abs=1.01e-4)


def test_transform_standardises_the_pixels(real):
    """The transform that training uses gives MNIST pixels mean 0 and standard deviation 1."""
    train, _ = real(MNIST, "MNIST/raw")
    out = MNIST().transform()(train.images[:20_000]).double()
    assert abs(float(out.mean())) < 0.01
    assert abs(float(out.std()) - 1) < 0.01


def test_fashion_mnist_facts(real):
    train, test = real(FashionMNIST, "FashionMNIST/raw")
    assert train.labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert torch.bincount(train.labels).tolist() == [6000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10


def test_cifar100_facts(real):
    train, test = real(CIFAR100, "cifar-100-python")
    assert train.images.shape == (50_000, 3, 32, 32)
    assert torch.bincount(train.labels).tolist() == [500] * 100
    assert torch.bincount(test.labels).tolist() == [100] * 100
    assert train.labels[:5].tolist() == [19, 29, 0, 11, 1]
    # channels in RGB order and in their place: the set's well-known own constants
    mean, std = own_statistics(train.images, 255.0)
    assert mean == pytest.approx((0.5071, 0.4865, 0.4409), abs=6e-5)
    assert std == pytest.approx((0.2673, 0.2564, 0.2762), abs=6e-5)


def test_usps_facts(real):
    train, test = real(USPS, "usps.npz")
    assert train.images.shape == (7291, 1, 16, 16)
    assert test.images.shape == (2007, 1, 16, 16)
    assert torch.bincount(train.labels).tolist() == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    assert torch.bincount(test.labels).tolist() == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]


def test_kmnist_of_another_length_is_used_with_a_warning(data_root, real, caplog):
    real(KMNIST, "KMNIST/raw")
    with caplog.at_level(logging.WARNING):
        train, test = KMNIST().load(data_root)
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    warned = [r.getMessage() for r in caplog.records if "published set has 60000 and 10000" in r.getMessage()]
    assert bool(warned) == (len(train) != 60_000)


def test_notmnist_sample_is_split(real):
    train, test = real(NotMNIST, "notMNIST/raw")
    whole = torch.bincount(train.labels) + torch.bincount(test.labels)
    if len(train) + len(test) != 10_000:
        pytest.skip("needs the 10,000 item sample of notMNIST")
    assert whole.tolist() == [1000] * 10
    assert torch.bincount(test.labels).tolist() == [100] * 10
    mean, std = own_statistics(train.images, 255.0)
    assert mean[0] == pytest.approx(NotMNIST.mean[0], abs=0.01)  # a sample of another size: near FOT's constants
    assert std[0] == pytest.approx(NotMNIST.std[0], abs=0.01)


def test_arrays_reads_a_real_subset(data_root):
    file = data_root / "cifar10_subset.npz"
    if not file.exists():
        pytest.skip(f"needs {file}")
    source = Arrays("cifar10_subset.npz")
    train, test = source.load(data_root)
    assert (source.shape, source.num_classes) == ((3, 32, 32), 10)
    assert len(train) == 5000
    assert len(test) == 4000
    assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # the beginning of CIFAR-10's data_batch_1: frog, truck, truck
    assert train.images[0, :, 0, 0].tolist() == [59, 62, 63]  # and its first pixel, in RGB


def test_svhn_facts(real):
    train, test = real(SVHN, "train_32x32.mat")
    assert (len(train), len(test)) == (73_257, 26_032)
    assert train.labels[:3].tolist() == [1, 9, 2]


# --- digits -----------------------------------------------------------------------------------------------------


def test_digits_split_and_constants(tmp_path):
    from sklearn.datasets import load_digits

    train, test = Digits().load(tmp_path)
    assert (len(train), len(test)) == (1437, 360)
    share = torch.bincount(test.labels) / (torch.bincount(train.labels) + torch.bincount(test.labels))
    assert float((share - 0.2).abs().max()) < 0.01  # stratified
    mean, std = own_statistics(train.images, 16.0)
    assert (round(mean[0], 4), round(std[0], 4)) == (Digits.mean[0], Digits.std[0])
    # together the two parts are scikit-learn's set, each sample with its own label
    stored = load_digits()

    def rows(images: np.ndarray, labels: np.ndarray) -> list[list[int]]:
        return sorted(np.column_stack([images.reshape(len(labels), -1), labels]).astype(int).tolist())

    both = np.concatenate([train.images.numpy(), test.images.numpy()])
    assert rows(both, torch.cat([train.labels, test.labels]).numpy()) == rows(stored.images, stored.target)


def test_digits_split_is_fixed(tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  the global state must not matter
    first = Digits().load(tmp_path)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    second = Digits().load(tmp_path)
    assert torch.equal(first[0].images, second[0].images)
    assert torch.equal(first[1].labels, second[1].labels)
    assert len(Digits(test_share=0.5).load(tmp_path)[1]) == 899


@pytest.mark.parametrize("test_share", [0.01, 0.2, 1 / 6, 0.5, 0.9])
@pytest.mark.parametrize("size", [200, 997])
@pytest.mark.parametrize("classes", [2, 7, 10])
def test_stratified_splits_are_those_of_scikit_learn(classes, size, test_share):
    from sklearn.model_selection import train_test_split

    labels = torch.from_numpy(np.sort(np.random.default_rng(size).integers(0, classes, size) ** 2))
    tests = max(test_share, 2 * classes / size)
    numbers = torch.arange(size)
    images = torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8)
    found = stratified_split("made up", ImageSet(images.reshape(-1, 2, 1, 1), labels), tests)
    wanted = train_test_split(np.arange(size), test_size=tests, stratify=labels.numpy(), random_state=0)
    for part, indices in zip(found, wanted, strict=True):
        assert (part.images.long().flatten(1) @ torch.tensor([256, 1])).tolist() == np.sort(indices).tolist()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.2, 20.0, float("nan")])
@pytest.mark.parametrize("source", [Digits, NotMNIST])
def test_test_share_is_validated(source, share):
    with pytest.raises(ConfigError, match=r"data\.stream\.source\.test_share"):
        source(test_share=share)


# --- absent files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", DOWNLOADED)
def test_absent_files_name_paths_and_addresses(source, tmp_path, no_network, capfd):
    from torchvision import datasets

    root = tmp_path / "sets"
    with pytest.raises(DataFilesMissing) as caught:
        source().load(root)
    text = str(caught.value)
    expected = {
        MNIST: ["MNIST/raw/train-images-idx3-ubyte", "MNIST/raw/t10k-labels-idx1-ubyte", "MNIST/raw/train-labels"],
        FashionMNIST: ["FashionMNIST/raw/t10k-images-idx3-ubyte", "FashionMNIST/raw/train-labels-idx1-ubyte"],
        KMNIST: ["KMNIST/raw/t10k-images-idx3-ubyte", "KMNIST/raw/train-labels-idx1-ubyte"],
        EMNISTLetters: ["EMNIST/raw/emnist-letters-train-images-idx3-ubyte", "EMNIST/raw/gzip.zip"],
        CIFAR10: ["cifar-10-batches-py/data_batch_5", "cifar-10-batches-py/test_batch", "cifar-10-python.tar.gz"],
        CIFAR100: ["cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"],
        SVHN: ["train_32x32.mat", "test_32x32.mat"],
        USPS: ["usps.bz2", "usps.t.bz2"],
    }[source]
    for name in expected:
        assert str(root / name) in text
    addresses = {
        MNIST: datasets.MNIST.mirrors[0] + "train-images-idx3-ubyte.gz",
        FashionMNIST: datasets.FashionMNIST.mirrors[0] + "t10k-labels-idx1-ubyte.gz",
        KMNIST: datasets.KMNIST.mirrors[0] + "train-images-idx3-ubyte.gz",
        EMNISTLetters: datasets.EMNIST.url,
        CIFAR10: datasets.CIFAR10.url,
        CIFAR100: datasets.CIFAR100.url,
        SVHN: datasets.SVHN.split_list["test"][0],
        USPS: datasets.USPS.split_list["train"][0],
    }
    assert addresses[source] in text
    assert "data.root" in text
    assert "CFL_DATA_ROOT" in text
    assert "Name or service not known" in text
    assert caught.value.__suppress_context__  # one message, not torchvision's chain of tracebacks
    assert not root.exists()  # the attempt leaves no empty folders
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_cifar10_error_offers_a_subset(tmp_path, no_network):
    with pytest.raises(DataFilesMissing, match=r"subset packed as \.npz.*Arrays"):
        CIFAR10().load(tmp_path)


def test_absent_notmnist_names_both_layouts(tmp_path):
    with pytest.raises(DataFilesMissing) as caught:
        NotMNIST().load(tmp_path)
    for part in (tmp_path / "notMNIST/raw/t10k-labels-idx1-ubyte", tmp_path / "notMNIST_small/A", "CFL_DATA_ROOT"):
        assert str(part) in str(caught.value)
    assert "notMNIST_small.tar.gz" in str(caught.value)


def test_network_is_asked_with_a_bounded_patience(tmp_path, monkeypatch):
    """Downloads time out early, because a network that drops packets would otherwise delay a run for minutes."""
    from cfl.data.sources import files

    seen = []

    def refuse(*args: object, **kwargs: object) -> None:
        seen.append(socket.getdefaulttimeout())
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(123.0)
    try:
        with pytest.raises(DataFilesMissing, match="timed out"):
            SVHN().load(tmp_path)
        assert socket.getdefaulttimeout() == 123.0
    finally:
        socket.setdefaulttimeout(before)
    assert set(seen) == {files.NETWORK_TIMEOUT}
    assert files.NETWORK_TIMEOUT <= 15
    assert len(seen) <= 3


def test_interrupted_download_leaves_no_cut_off_file(tmp_path, monkeypatch):
    def cut_off(url: str, root: str, filename: str, md5: str) -> None:
        Path(root, filename).write_bytes(b"only the beginning")
        raise ConnectionResetError("connection reset")

    monkeypatch.setattr("torchvision.datasets.svhn.download_url", cut_off)
    (tmp_path / "other.txt").write_text("stays")
    with pytest.raises(DataFilesMissing, match="connection reset"):
        SVHN().load(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.txt"]


# --- files that are present, packed or damaged ------------------------------------------------------------------


def test_packed_files_are_unpacked_without_network(tmp_path, no_network, monkeypatch, caplog):
    from torchvision import datasets

    raw = tmp_path / "MNIST" / "raw"
    written = small_mnist(raw, ".gz")
    sums = [(f.name, hashlib.md5(f.read_bytes()).hexdigest()) for f in sorted(raw.iterdir())]
    monkeypatch.setattr(datasets.MNIST, "resources", sums)
    source = MNIST()
    assert source.unlike_published == ""
    with caplog.at_level(logging.WARNING):
        train, test = source.load(tmp_path)
    said = "MNIST has 30 training and 30 test samples; the published set has 60000 and 10000"
    assert source.unlike_published == said
    assert Permuted(Binarised(source)).unlike_published == [said]
    assert Sequence([source, source, Digits()]).unlike_published == [said]
    np.testing.assert_array_equal(train.images[:, 0].numpy(), written["train images"])
    np.testing.assert_array_equal(test.images[:, 0].numpy(), written["t10k images"])
    assert test.labels.tolist() == written["t10k labels"].tolist()
    assert "has 30 training and 30 test samples; the published set has 60000 and 10000" in caplog.text


def test_packed_file_with_a_wrong_md5_is_refused_and_kept(tmp_path, no_network):
    raw = tmp_path / "MNIST" / "raw"
    small_mnist(raw, ".gz")
    before = {f.name: f.read_bytes() for f in raw.iterdir()}
    with pytest.raises(DataFilesMissing) as caught:
        MNIST().load(tmp_path)
    text = str(caught.value)
    assert f"{raw / 'train-images-idx3-ubyte.gz'} is damaged" in text
    assert hashlib.md5(before["train-images-idx3-ubyte.gz"]).hexdigest() in text
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in text  # the published sum
    assert {f.name: f.read_bytes() for f in raw.iterdir()} == before


@pytest.mark.parametrize("keep", [0, 3, 10, 16, 5000])
def test_cut_off_idx_file_is_named(tmp_path, no_network, keep):
    raw = tmp_path / "MNIST" / "raw"
    small_mnist(raw)
    cut = raw / "t10k-images-idx3-ubyte"
    cut.write_bytes(cut.read_bytes()[:keep])
    with pytest.raises(DataFilesMissing, match=r"t10k-images-idx3-ubyte is damaged") as caught:
        MNIST().load(tmp_path)
    assert "train-images" not in str(caught.value)


def test_labels_that_do_not_match_the_images_are_refused(tmp_path, no_network):
    raw = tmp_path / "KMNIST" / "raw"
    small_mnist(raw)
    write_idx(raw / "train-labels-idx1-ubyte", np.zeros(29))
    with pytest.raises(DataFilesMissing, match=r"KMNIST cannot be read.*N=30.*29"):
        KMNIST().load(tmp_path)


def test_labels_out_of_range_are_refused(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    small_mnist(raw)
    write_idx(raw / "t10k-labels-idx1-ubyte", np.arange(30))
    with pytest.raises(DataFilesMissing, match=r"test labels run from 0 to 29"):
        MNIST().load(tmp_path)


def test_images_of_another_size_are_refused(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    small_mnist(raw)
    write_idx(raw / "train-images-idx3-ubyte", np.zeros((30, 14, 14)))
    with pytest.raises(DataFilesMissing, match=r"\[1, 14, 14\], not \[1, 28, 28\]"):
        MNIST().load(tmp_path)


def test_corrupt_cifar_batch_is_refused(tmp_path, no_network):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "train").write_bytes(b"not a pickle")
    with pytest.raises(DataFilesMissing, match=r"cifar-100-python/train is damaged: its md5 is") as caught:
        CIFAR100().load(tmp_path)
    assert "16019d7e3df5f24257cddd939b257f8d" in str(caught.value)
    assert (folder / "train").read_bytes() == b"not a pickle"


def test_corrupt_usps_is_refused_although_torchvision_would_read_it(tmp_path, no_network):
    """A readable file with other content is refused by its md5, which torchvision does not compare here."""
    import bz2

    line = "1 " + " ".join(f"{i}:0.0" for i in range(1, 257)) + "\n"
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(bz2.compress(line.encode()))
    with pytest.raises(DataFilesMissing, match=r"usps\.bz2 is damaged.*ec16c51db3855ca6c91edd34d0e9b197"):
        USPS().load(tmp_path)


def test_usps_bz2_pixels(tmp_path, monkeypatch):
    """LIBSVM's text is read: labels 1..10, pixels -1..1 in row-major order."""
    import bz2

    from torchvision import datasets

    rng = np.random.default_rng(0)
    stored = rng.integers(0, 255, (12, 256))
    values = (stored + 0.5) / 255 * 2 - 1  # between two integers, so that cutting to an integer is unambiguous
    labels = np.arange(12) % 10
    lines = [f"{labels[i] + 1} " + " ".join(f"{j + 1}:{v:.9f}" for j, v in enumerate(values[i])) for i in range(12)]
    listed = {}
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        data = bz2.compress("\n".join(lines).encode())
        (tmp_path / name).write_bytes(data)
        listed[part] = ["http://localhost/none", name, hashlib.md5(data).hexdigest()]
    monkeypatch.setattr(datasets.USPS, "split_list", listed)
    train, _ = USPS().load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), stored.reshape(12, 1, 16, 16))
    assert train.labels.tolist() == labels.tolist()


def test_usps_npz_of_another_size_is_used_with_a_warning(tmp_path, caplog):
    images, labels = np.zeros((20, 16, 16), np.uint8), np.arange(20) % 10
    parts = {"train_images": images, "train_labels": labels, "test_images": images[:10], "test_labels": labels[:10]}
    np.savez(tmp_path / "usps.npz", **parts)
    source = USPS()
    with caplog.at_level(logging.WARNING):
        train, test = source.load(tmp_path)
    assert (len(train), len(test)) == (20, 10)
    said = "USPS has 20 training and 10 test samples; the published set has 7291 and 2007"
    assert source.unlike_published == said
    assert said in caplog.text


def test_svhn_channels_and_digit_zero(tmp_path, monkeypatch):
    import scipy.io
    from torchvision import datasets

    listed = {}
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20) % 10 + 1  # 1..10, ten means zero
    for part in ("train", "test"):
        file = tmp_path / f"{part}_32x32.mat"
        scipy.io.savemat(file, {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None].astype(np.uint8)})
        listed[part] = ["http://localhost/none", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", listed)
    train, _ = SVHN().load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), images.transpose(0, 3, 1, 2))
    assert train.labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0] * 2


def test_emnist_letters_are_upright_and_counted_from_zero(tmp_path):
    raw = tmp_path / "EMNIST" / "raw"
    upright = np.zeros((26, 28, 28), dtype=np.uint8)
    upright[:, 4:24, 6] = 255  # an L: a tall stroke at the left ...
    upright[:, 23, 6:18] = 255  # ... and a short one along the bottom
    for part in ("train", "test"):
        write_idx(raw / f"emnist-letters-{part}-images-idx3-ubyte", upright.transpose(0, 2, 1))  # column-major
        write_idx(raw / f"emnist-letters-{part}-labels-idx1-ubyte", np.arange(1, 27))
    train, _ = EMNISTLetters().load(tmp_path)
    np.testing.assert_array_equal(train.images[:, 0].numpy(), upright)
    assert train.labels.tolist() == list(range(26))


# --- notMNIST layouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_notmnist_with_its_own_training_files_is_not_split(tmp_path, suffix):
    written = small_mnist(tmp_path / "notMNIST" / "raw", suffix)
    train, test = NotMNIST().load(tmp_path)
    np.testing.assert_array_equal(train.images[:, 0].numpy(), written["train images"])
    np.testing.assert_array_equal(test.images[:, 0].numpy(), written["t10k images"])


def test_notmnist_split_keeps_every_sample_once(tmp_path, caplog):
    written = small_mnist(tmp_path / "notMNIST" / "raw", parts=("t10k",))
    source = NotMNIST(test_share=1 / 3)
    with caplog.at_level(logging.WARNING):
        train, test = source.load(tmp_path)
    assert source.unlike_published == "NotMNIST has 30 samples; the published archive has 18724"
    assert torch.bincount(test.labels).tolist() == [1] * 10
    both = np.concatenate([train.images.numpy(), test.images.numpy()]).reshape(30, -1)
    np.testing.assert_array_equal(np.unique(both, axis=0), np.unique(written["t10k images"].reshape(30, -1), axis=0))
    assert "30 test samples are split" in caplog.text


def test_damaged_notmnist_is_refused(tmp_path):
    raw = tmp_path / "notMNIST" / "raw"
    small_mnist(raw, ".gz")
    file = raw / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(DataFilesMissing, match=r"t10k-images-idx3-ubyte\.gz is damaged"):
        NotMNIST().load(tmp_path)


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_notmnist_images_leave_out_the_unreadable(tmp_path, caplog, packed):
    from PIL import Image

    folder = tmp_path / "notMNIST_small"
    for k, letter in enumerate("ABCDEFGHIJ"):
        (folder / letter).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((28, 28), 20 * k + i, dtype=np.uint8)).save(folder / letter / f"{i}.png")
    (folder / "F" / "broken.png").write_bytes(b"")  # as in the published archive
    if packed:
        shutil.make_archive(str(folder), "gztar", tmp_path, folder.name)
        shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        train, test = NotMNIST(test_share=0.25).load(tmp_path)
    assert (len(train), len(test)) == (30, 10)
    assert torch.equal(torch.cat([train.images, test.images])[:, 0, 0, 0] // 20, torch.cat([train.labels, test.labels]))
    assert "broken.png" in caplog.text
    assert folder.is_dir() != packed


@pytest.mark.parametrize("damage", ["cut", "no archive", "another folder"])
def test_damaged_notmnist_archive_is_refused(tmp_path, damage):
    archive = tmp_path / "notMNIST_small.tar.gz"
    (tmp_path / "other" / "A").mkdir(parents=True)
    (tmp_path / "other" / "A" / "0.png").write_bytes(np.random.default_rng(0).bytes(9000))
    shutil.make_archive(str(tmp_path / "notMNIST_small"), "gztar", tmp_path, "other")
    if damage == "cut":
        archive.write_bytes(archive.read_bytes()[:4000])
    elif damage == "no archive":
        archive.write_bytes(b"not an archive")
    with pytest.raises(DataFilesMissing, match=r"notMNIST_small\.tar\.gz (cannot be unpacked|holds no folder)"):
        NotMNIST().load(tmp_path)


# --- arrays -----------------------------------------------------------------------------------------------------


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
        with pytest.raises(ConfigError, match=rf"data\.stream\.source\.{field}.*absent\.npz"):
            getattr(source, field)
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


# --- folders of images ------------------------------------------------------------------------------------------


def image_tree(root: Path) -> np.ndarray:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 6, 3), dtype=np.uint8)  # [class, i, H, W, C]
    for part, count in (("train", 3), ("test", 1)):
        for k, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(pixels[k, i]).save(root / part / name / f"{i}.png")
    return pixels


def test_images_of_mixed_sizes_are_stretched_or_cropped_to_one(tmp_path):
    """``crop`` scales the middle of a picture, cut to the wanted proportions. The default scales the whole picture."""
    pictures = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (8, 20, 3), dtype=np.uint8)) for n in (0, 1)]
    pictures += [pictures[0].rotate(90, expand=True), pictures[0].crop((6, 0, 10, 4))]
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for n, picture in enumerate(pictures):
                picture.save(tmp_path / part / name / f"{n}.png")
    ways = ("stretch", "crop")
    found = {how: ImageFolder(str(tmp_path), [3, 4, 4], resize=how).load(tmp_path)[0].images for how in ways}
    whole = pictures[0].resize((4, 4), Image.Resampling.BILINEAR)
    middle = pictures[0].resize((4, 4), Image.Resampling.BILINEAR, box=(6, 0, 14, 8))
    assert torch.equal(found["stretch"][0], torch.from_numpy(np.array(whole)).permute(2, 0, 1))
    assert torch.equal(found["crop"][0], torch.from_numpy(np.array(middle)).permute(2, 0, 1))
    assert torch.equal(found["crop"][3], found["stretch"][3])  # this picture already has the size
    assert torch.equal(ImageFolder(str(tmp_path), [3, 4, 4]).load(tmp_path)[0].images, found["stretch"])
    with pytest.raises(ConfigError, match=r"source\.resize = 'pad' cannot work; valid: stretch or crop"):
        ImageFolder(str(tmp_path), [3, 4, 4], resize="pad")


def test_classes_go_by_the_names_of_their_folders(tmp_path):
    image_tree(tmp_path / "pets")
    source = ImageFolder("pets", shape=[3, 4, 6], num_classes=2)
    assert source.names(tmp_path) == tuple(sorted(path.name for path in (tmp_path / "pets" / "train").iterdir()))
    assert source.names(tmp_path / "elsewhere") == ("0", "1")


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100, FashionMNIST, KMNIST, EMNISTLetters, NotMNIST])
def test_every_class_of_a_published_data_set_has_a_name_of_its_own(kind):
    assert len(set(kind().names(Path()))) == kind.num_classes


def test_image_folder_pixels_and_labels(tmp_path):
    pixels = image_tree(tmp_path / "pets")
    source = ImageFolder("pets", shape=[3, 4, 6])
    train, test = source.load(tmp_path)
    np.testing.assert_array_equal(train.images.numpy(), pixels.reshape(6, 4, 6, 3).transpose(0, 3, 1, 2))
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test.labels.tolist() == [0, 1]
    assert (source.name, source.num_classes) == ("pets", 2)
    assert ImageFolder(str(tmp_path / "pets"), shape=[3, 4, 6]).num_classes == 2


def test_image_folder_converts_and_scales(tmp_path):
    pixels = image_tree(tmp_path / "pets").astype(np.float64)
    grey, _ = ImageFolder("pets", shape=[1, 4, 6]).load(tmp_path)
    luma = pixels @ np.array([0.299, 0.587, 0.114])  # ITU-R 601-2, Pillow's documented conversion
    assert np.abs(grey.images.numpy().reshape(2, 3, 4, 6) - luma).max() <= 1
    small, _ = ImageFolder("pets", shape=[3, 1, 1]).load(tmp_path)
    # one output pixel: the antialiased triangle over the whole image, weights falling from the centre
    rows, columns = (1 - np.abs(np.arange(n) + 0.5 - n / 2) / n for n in (4, 6))
    weights = np.outer(rows / rows.sum(), columns / columns.sum())
    expected = np.einsum("kihwc,hw->kic", pixels, weights).reshape(6, 3)
    assert np.abs(small.images.numpy().reshape(6, 3) - expected).max() <= 1.5


def test_image_folder_refuses(tmp_path):
    with pytest.raises(DataFilesMissing, match=r"pets/train and .*pets/test: missing"):
        ImageFolder("pets", shape=[3, 4, 6], num_classes=2).load(tmp_path)
    with pytest.raises(ConfigError, match=r"source\.num_classes"):
        _ = ImageFolder(str(tmp_path / "pets"), shape=[3, 4, 6]).num_classes
    image_tree(tmp_path / "pets")
    with pytest.raises(ConfigError, match=r"source\.num_classes = 3.*2, the number of folders"):
        ImageFolder("pets", shape=[3, 4, 6], num_classes=3).load(tmp_path)
    (tmp_path / "pets" / "train" / "dog" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataFilesMissing, match=r"dog/0\.png cannot be read as an image"):
        ImageFolder("pets", shape=[3, 4, 6]).load(tmp_path)
    (tmp_path / "pets" / "test" / "fox").mkdir()
    with pytest.raises(DataFilesMissing, match=r"same classes.*fox"):
        ImageFolder("pets", shape=[3, 4, 6]).load(tmp_path)
    for shape in ([2, 4, 6], [3, 4], [3, 0, 6]):
        with pytest.raises(ConfigError, match=r"source\.shape"):
            ImageFolder("pets", shape=shape)


# --- synthetic --------------------------------------------------------------------------------------------------


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


# --- common options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FIXED)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mean", [0.1, 0.2]),
        ("mean", []),
        ("std", [0.1, 0.2]),
        ("std", [0.0]),
        ("std", [-1.0]),
        ("std", [float("inf")]),
        ("mean", [float("nan")]),
        ("max_train", 0),
        ("max_train", 9),
        ("max_test", -5),
    ],
)
def test_common_options_are_validated(source, key, value):
    with pytest.raises(ConfigError, match=rf"data\.stream\.source\.{key} = "):
        source(**{key: value})


def test_given_normalisation_replaces_the_default():
    source = CIFAR10(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    assert source.transform()(black_and_white).flatten().tolist() == pytest.approx([-1] * 3 + [1] * 3)
    assert CIFAR10().mean == pytest.approx((0.4914, 0.4824, 0.4467), abs=1e-4)  # other instances keep theirs
    assert MNIST(mean=[0.0], std=[1.0]).transform()(black_and_white[:, :1]).flatten().tolist() == [0.0, 1.0]


def test_paper_constants():
    """Constants are those of FOT's code: 5-Datasets for CIFAR-10, SVHN, notMNIST; permuted MNIST; Split-CIFAR100."""
    assert [v * 255 for v in CIFAR10.mean] == pytest.approx([125.3, 123.0, 113.9])
    assert [v * 255 for v in CIFAR10.std] == pytest.approx([63.0, 62.1, 66.7])
    assert (CIFAR100.mean, CIFAR100.std) == ((0.4914, 0.4824, 0.4467), (0.2471, 0.24353, 0.2616))
    assert (SVHN.mean, SVHN.std) == ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197))
    assert (NotMNIST.mean, NotMNIST.std) == ((0.4254,), (0.4501,))
    assert (MNIST.mean, MNIST.std) == ((0.1307,), (0.3081,))


def test_limits_give_a_fixed_balanced_subset(tmp_path):
    whole, whole_test = Digits().load(tmp_path)
    train, test = Digits(max_train=105, max_test=20).load(tmp_path)
    assert torch.bincount(train.labels).tolist() == [11] * 5 + [10] * 5
    assert torch.bincount(test.labels).tolist() == [2] * 10
    again, _ = Digits(max_train=105).load(tmp_path)
    assert torch.equal(train.images, again.images)
    stored = {(image.numpy().tobytes(), int(label)) for image, label in zip(whole.images, whole.labels, strict=True)}
    assert all((i.numpy().tobytes(), int(k)) in stored for i, k in zip(train.images, train.labels, strict=True))
    assert len(Digits(max_train=10_000).load(tmp_path)[0]) == len(whole)
    assert len(whole_test) == 360


def test_balanced_subset_properties():
    labels = torch.tensor([0] * 50 + [1] * 3 + [2] * 20)[torch.randperm(73, generator=torch.Generator().manual_seed(0))]
    smaller = balanced_subset(labels, 12, "test")
    larger = balanced_subset(labels, 30, "test")
    assert torch.bincount(labels[smaller]).tolist() == [5, 3, 4]  # the rare class gives all it has
    assert torch.bincount(labels[larger]).tolist() == [14, 3, 13]
    assert set(smaller.tolist()) < set(larger.tolist())
    assert larger.tolist() == sorted(set(larger.tolist()))
    assert balanced_subset(labels, 73, "test").tolist() == list(range(73))
    assert balanced_subset(labels, 12, "another").tolist() != smaller.tolist()
    # a random choice, not the first of each class
    firsts = [i for k in range(3) for i in torch.nonzero(labels == k).flatten().tolist()[:4]]
    assert sorted(firsts)[:12] != smaller.tolist()


# --- roots, names, imports --------------------------------------------------------------------------------------


def test_data_root_order(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "environment"))
    assert resolve_root(str(tmp_path)) == tmp_path
    assert resolve_root(None) == tmp_path / "environment"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_root("~/sets") == tmp_path / "sets"
    monkeypatch.setenv("CFL_DATA_ROOT", "")
    assert resolve_root(None) == Path("data")
    monkeypatch.delenv("CFL_DATA_ROOT")
    assert resolve_root(None) == Path("data")


def test_data_root_refuses_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.root"):
        resolve_root(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"data\.root"):
        resolve_root("")
    monkeypatch.setenv("CFL_DATA_ROOT", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="CFL_DATA_ROOT"):
        resolve_root(None)


def test_config_builds_every_source_by_its_short_name():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Source, "source")
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    boxes = {"path": "x", "shape": [1, 8, 8], "classes": ["a"]}
    needed = {"Arrays": {"path": "x.npz"}, "ImageFolder": {"path": "x", "shape": [3, 8, 8]}}
    needed |= {"RecordedFrames": boxes, "VocBoxes": boxes}
    needed["CocoBoxes"] = {**boxes, "train": "a.json", "test": "b.json", "train_images": "images"}
    names = [name for name in sources.__all__ if name not in ("Source", "data_root")]
    assert len(names) == 24
    fake = {"class_path": "torchvision.datasets.FakeData", "init_args": {"size": 4, "image_size": [3, 8, 8]}}
    others = {
        "Binarised": {"source": {"class_path": "MNIST"}},
        "BinarySet": {"set": "adult"},
        "CsvTable": {"path": "x.csv", "label": "y"},
        "Features": {"path": "x.npz"},
        "FromDataset": {"train": fake, "test": fake},
    }
    for name, options in others.items():
        config = parser.parse_object({"source": {"class_path": name, "init_args": options}})
        assert type(instantiate(config).source) is getattr(sources, name)
    for name in set(names) - set(others):
        channels = 3 if name in ("CIFAR10", "CIFAR100", "SVHN", "ImageFolder", "MiniImageNet", "TinyImageNet") else 1
        options = {"std": [0.5] * channels, "max_train": 200, **needed.get(name, {})}
        config = parser.parse_object({"source": {"class_path": name, "init_args": options}})
        built = instantiate(config).source
        assert type(built) is getattr(sources, name)
        assert built.std == (0.5,) * channels
        assert built.max_train == 200


def test_importing_the_sources_is_light():
    """Importing and building sources does not import torchvision, scikit-learn, SciPy or Pillow."""
    code = (
        "import sys, cfl.data.sources as s; s.MNIST(); s.Digits(); s.Synthetic();"
        "print([m for m in ('torchvision', 'sklearn', 'scipy', 'PIL') if m in sys.modules])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
