"""Data sets in the layout and with the checks and downloads of ``torchvision.datasets``.

A root that torchvision filled can be used unchanged. torchvision is imported only when a set is read.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cfl.data.sources.files import DataFile, fetch, refuse_damaged
from cfl.data.sources.standard import StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing

_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)


class TorchvisionSource(StandardSource):
    """A data set that torchvision reads.

    Files under the root are used without any network. Otherwise torchvision's download is tried. A damaged
    file stops the run: it is neither used nor overwritten.

    Attributes:
        title: torchvision's name of the data set.
        hint: another way to get the data, for the error message.
    """

    title: ClassVar[str]
    hint: ClassVar[str] = ""

    @property
    def _torchvision(self) -> Any:
        """torchvision's class of the data set."""
        from torchvision import datasets

        return getattr(datasets, self.title)

    def _files(self, root: Path) -> list[DataFile]:
        """Every file that torchvision reads, with the addresses and md5 sums torchvision knows: one for each part."""
        listed = [self._torchvision.split_list[part] for part in ("train", "test")]
        return [DataFile(root / name, md5, address) for address, name, md5 in listed]

    def _options(self, train: bool) -> dict[str, Any]:
        """Options of :attr:`_torchvision` that choose the training or the test set."""
        return {"train": train}

    @abstractmethod
    def _samples(self, dataset: Any) -> ImageSet:
        """The samples of torchvision's training or test set."""

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set: from files, else downloaded; see :meth:`load`."""

        def both(download: bool) -> tuple[ImageSet, ImageSet]:
            train, test = (
                self._samples(self._torchvision(str(root), **self._options(part), download=download))
                for part in (True, False)
            )
            return train, test

        files = self._files(root)
        try:
            return both(download=False)
        except Exception as error:  # torchvision's parsers raise exceptions of many classes
            refuse_damaged(self.title, files)
            if all(file.path.is_file() for file in files):
                names = ", ".join(str(file.path) for file in files)
                raise DataFilesMissing(f"{self.title} cannot be read from {names}: {error}") from error
            return fetch(self.title, files, lambda: both(download=True), self.hint)


class _IdxSource(TorchvisionSource):
    """MNIST's layout: ``<root>/<title>/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``, unpacked or as ``.gz``."""

    shape = (1, 28, 28)
    num_classes = 10
    published = (60_000, 10_000)

    def _files(self, root: Path) -> list[DataFile]:
        dataset = self._torchvision
        raw = root / self.title / "raw"
        archives = [DataFile(raw / name, md5, dataset.mirrors[0] + name) for name, md5 in dataset.resources]
        return [DataFile(file.path.with_suffix(""), archive=file, is_idx=True) for file in archives]

    def _samples(self, dataset: Any) -> ImageSet:
        return ImageSet(dataset.data.unsqueeze(1), dataset.targets.long())


class MNIST(_IdxSource):
    """Handwritten digits, 60,000 + 10,000 of 28x28 (LeCun, Cortes, Burges).

    Files: ``<root>/MNIST/raw/``, torchvision's layout. Default normalisation: that of the training pixels,
    used by FOT for permuted MNIST. FOT's 5-Datasets use mean 0.1, std 0.2752, those of images padded to 32x32;
    Fed-A-GEM uses none (mean 0, std 1).
    """

    name = "mnist"
    title = "MNIST"
    mean = (0.1307,)
    std = (0.3081,)


class FashionMNIST(_IdxSource):
    """Zalando's articles, 60,000 + 10,000 of 28x28 (Xiao, Rasul, Vollgraf 2017).

    Files: ``<root>/FashionMNIST/raw/``, torchvision's layout. Default normalisation: that of the training
    pixels. FOT's 5-Datasets use mean 0.2190, std 0.3318, those of images padded to 32x32.
    """

    name = "fashionmnist"
    title = "FashionMNIST"
    class_names = (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
    mean = (0.2860,)
    std = (0.3530,)


class KMNIST(_IdxSource):
    """Cursive Japanese characters, 60,000 + 10,000 of 28x28 (Clanuwat et al. 2018).

    Classes are named ``kana`` and their sound, because ``o`` alone is also the name of a letter.

    Files: ``<root>/KMNIST/raw/``, torchvision's layout. Default normalisation: the customary values of this set.
    """

    name = "kmnist"
    title = "KMNIST"
    class_names = tuple(f"kana {sound}" for sound in ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"))
    mean = (0.1918,)
    std = (0.3483,)


class EMNISTLetters(TorchvisionSource):
    """Handwritten letters of both cases in 26 classes, 124,800 + 20,800 of 28x28 (Cohen et al. 2017).

    Files: ``<root>/EMNIST/raw/emnist-letters-{train,test}-{images-idx3,labels-idx1}-ubyte``, torchvision's layout.
    The files hold the images transposed and the labels as 1..26; here the images are upright like MNIST's
    and the labels 0..25 (a..z). Default normalisation: the customary values of this split.
    """

    name = "emnist-letters"
    title = "EMNIST"
    class_names = tuple("abcdefghijklmnopqrstuvwxyz")
    shape = (1, 28, 28)
    num_classes = 26
    mean = (0.1722,)
    std = (0.3309,)
    published = (124_800, 20_800)

    def _files(self, root: Path) -> list[DataFile]:
        raw = root / "EMNIST" / "raw"
        address = self._torchvision.url
        archive = DataFile(raw / address.rsplit("/", 1)[-1], self._torchvision.md5, address)
        names = [f"emnist-letters-{p}-{k}-ubyte" for p in ("train", "test") for k in ("images-idx3", "labels-idx1")]
        return [DataFile(raw / name, archive=archive, is_idx=True) for name in names]

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": "letters", "train": train}

    def _samples(self, dataset: Any) -> ImageSet:
        return ImageSet(dataset.data.transpose(1, 2).unsqueeze(1).contiguous(), dataset.targets.long() - 1)


class _CIFAR(TorchvisionSource):
    """Krizhevsky's python batches, whose md5 sums torchvision checks."""

    shape = (3, 32, 32)
    published = (50_000, 10_000)

    def _files(self, root: Path) -> list[DataFile]:
        dataset = self._torchvision
        archive = DataFile(root / dataset.filename, dataset.tgz_md5, dataset.url)
        listed = [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]
        return [DataFile(root / dataset.base_folder / name, md5, archive=archive) for name, md5 in listed]

    def _samples(self, dataset: Any) -> ImageSet:
        images = np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2))
        return ImageSet(torch.from_numpy(images), torch.tensor(dataset.targets, dtype=torch.int64))


class CIFAR10(_CIFAR):
    """Tiny colour photographs in 10 classes, 50,000 + 10,000 of 32x32 (Krizhevsky 2009).

    Files: ``<root>/cifar-10-batches-py/``, torchvision's layout. Default normalisation: FOT's 5-Datasets,
    (125.3, 123.0, 113.9) / 255 and (63.0, 62.1, 66.7) / 255. Fed-A-GEM uses 0.5 for all six numbers.
    """

    name = "cifar10"
    title = "CIFAR10"
    num_classes = 10
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mean = (125.3 / 255, 123.0 / 255, 113.9 / 255)
    std = (63.0 / 255, 62.1 / 255, 66.7 / 255)
    hint = "A subset packed as .npz can be used instead: choose the source Arrays and give its path."


class CIFAR100(_CIFAR):
    """Tiny colour photographs in 100 classes, 50,000 + 10,000 of 32x32 (Krizhevsky 2009).

    Files: ``<root>/cifar-100-python/``, torchvision's layout. Labels are the fine ones. Default normalisation:
    FOT's, which is close to that of CIFAR-10's pixels, not this set's. Fed-A-GEM uses this set's own, mean
    (0.5071, 0.4865, 0.4409), std (0.2673, 0.2564, 0.2762).
    """

    name = "cifar100"
    title = "CIFAR100"
    num_classes = 100
    class_names = tuple(_CIFAR100_CLASSES.split())
    mean = (0.4914, 0.4824, 0.4467)
    std = (0.2471, 0.24353, 0.2616)
    superclasses = (
        (4, 30, 55, 72, 95),  # aquatic mammals
        (1, 32, 67, 73, 91),  # fish
        (54, 62, 70, 82, 92),  # flowers
        (9, 10, 16, 28, 61),  # food containers
        (0, 51, 53, 57, 83),  # fruit and vegetables
        (22, 39, 40, 86, 87),  # household electrical devices
        (5, 20, 25, 84, 94),  # household furniture
        (6, 7, 14, 18, 24),  # insects
        (3, 42, 43, 88, 97),  # large carnivores
        (12, 17, 37, 68, 76),  # large man-made outdoor things
        (23, 33, 49, 60, 71),  # large natural outdoor scenes
        (15, 19, 21, 31, 38),  # large omnivores and herbivores
        (34, 63, 64, 66, 75),  # medium mammals
        (26, 45, 77, 79, 99),  # non-insect invertebrates
        (2, 11, 35, 46, 98),  # people
        (27, 29, 44, 78, 93),  # reptiles
        (36, 50, 65, 74, 80),  # small mammals
        (47, 52, 56, 59, 96),  # trees
        (8, 13, 48, 58, 90),  # vehicles 1
        (41, 69, 81, 85, 89),  # vehicles 2
    )


class SVHN(TorchvisionSource):
    """House number digits in colour, 73,257 + 26,032 of 32x32 (Netzer et al. 2011).

    Files: ``<root>/train_32x32.mat`` and ``<root>/test_32x32.mat``, torchvision's layout. The files label
    the digit 0 as 10; here it is 0. Default normalisation: FOT's 5-Datasets.
    """

    name = "svhn"
    title = "SVHN"
    shape = (3, 32, 32)
    num_classes = 10
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.198, 0.201, 0.197)
    published = (73_257, 26_032)

    def _options(self, train: bool) -> dict[str, Any]:
        return {"split": "train" if train else "test"}

    def _samples(self, dataset: Any) -> ImageSet:
        return ImageSet(torch.from_numpy(np.ascontiguousarray(dataset.data)), torch.from_numpy(dataset.labels))
