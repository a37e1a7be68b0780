"""Facts about the published files of data sets, and the split of the digits."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cfl.data.sources import (
    CIFAR100,
    KMNIST,
    MNIST,
    SVHN,
    USPS,
    Arrays,
    Digits,
    FashionMNIST,
    NotMNIST,
    Source,
)
from cfl.data.sources.split import stratified_split
from cfl.data.types import ImageSet
from cfl.runtime.errors import ConfigError


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


# Real files.


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


def test_superclasses_of_cifar100_are_those_of_its_files(data_root, real):
    """The files give every image's superclass, which the source does not read."""
    real(CIFAR100, "cifar-100-python")
    batch = pickle.loads((data_root / "cifar-100-python/test").read_bytes(), encoding="latin1")
    pairs = set(zip(batch["coarse_labels"], batch["fine_labels"], strict=True))
    found = {(number, label) for number, labels in enumerate(CIFAR100.superclasses) for label in labels}
    assert found == pairs


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


# Digits.


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
