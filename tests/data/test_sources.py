"""Sources: absent, packed, damaged and unsuitable files, common options, and the data root."""

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
from itertools import combinations
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
    Binarised,
    Digits,
    EMNISTLetters,
    FashionMNIST,
    MiniImageNet,
    NotMNIST,
    Source,
    TinyImageNet,
    YahooAnswers,
)
from cfl.data.sources import (
    data_root as resolve_root,
)
from cfl.data.sources.split import balanced_subset
from cfl.data.streams import Permuted, Sequence
from cfl.runtime.errors import ConfigError, DataFilesMissing

FIXED = [Digits, MNIST, FashionMNIST, EMNISTLetters, KMNIST, CIFAR10, CIFAR100, SVHN, NotMNIST, USPS]
FIXED += [MiniImageNet, TinyImageNet, YahooAnswers]
DOWNLOADED = [MNIST, FashionMNIST, EMNISTLetters, KMNIST, CIFAR10, CIFAR100, SVHN, USPS]


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


@pytest.mark.parametrize(("first", "second"), combinations((MNIST, FashionMNIST, EMNISTLetters, KMNIST, CIFAR10), 2))
def test_data_sets_of_different_things_may_share_outputs(first: type, second: type, tmp_path: Path) -> None:
    """Only a class that both have has to have one number in both; a kana is no letter, though both are written o."""
    Sequence([first(), second()]).check_numbers(tmp_path, shared_outputs=True)


# Absent files.


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


# Files that are present, packed or damaged.


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


# NotMNIST layouts.


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


# Common options.


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


# Roots, names, imports.


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
    boxes = {"path": "x", "shape": [1, 8, 8], "classes": ["a"]}
    needed = {"Arrays": {"path": "x.npz"}, "ImageFolder": {"path": "x", "shape": [3, 8, 8]}}
    needed |= {"RecordedFrames": boxes, "VocBoxes": boxes}
    needed["CocoBoxes"] = {**boxes, "train": "a.json", "test": "b.json", "train_images": "images"}
    names = [name for name in sources.__all__ if name not in ("Source", "data_root")]
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
        assert type(parser.instantiate(config).source) is getattr(sources, name)
    for name in set(names) - set(others):
        shape = needed.get(name, {}).get("shape", getattr(getattr(sources, name), "shape", None))
        channels = shape[0] if isinstance(shape, list | tuple) else 1  # Arrays finds it in its file
        options = {"std": [0.5] * channels, "max_train": 200, **needed.get(name, {})}
        config = parser.parse_object({"source": {"class_path": name, "init_args": options}})
        built = parser.instantiate(config).source
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
