"""notMNIST, which is published as one set of image files and also distributed as idx files."""

from __future__ import annotations

import logging
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.folder import read_class_folders
from cfl.data.sources.idx import read_idx
from cfl.data.sources.split import SHARES, stratified_split
from cfl.data.sources.standard import KEY, StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing
from cfl.runtime.option_checks import check_numbers

_PUBLISHED = (18_724, 18_726)
"""Numbers of samples that count as the published ones: the archive's readable images, or two more as in FOT."""
_MOST_UNPACKED = 1 << 28
_log = logging.getLogger(__name__)
_FOLDER = "notMNIST_small"
_ARCHIVE = f"{_FOLDER}.tar.gz"
_ADDRESS = f"http://yaroslavvb.com/upload/notMNIST/{_ARCHIVE}"


def _idx_files(raw: Path, part: str) -> tuple[Path, Path] | None:
    """Images and labels of one part, unpacked or ``.gz``; None unless both exist."""
    found = []
    for kind in ("images-idx3", "labels-idx1"):
        plain = raw / f"{part}-{kind}-ubyte"
        packed = plain.with_name(plain.name + ".gz")
        found.append(plain if plain.is_file() else packed if packed.is_file() else None)
    images, labels = found
    return None if images is None or labels is None else (images, labels)


def _read_part(images_file: Path, labels_file: Path) -> ImageSet:
    try:
        images, labels = read_idx(images_file), read_idx(labels_file)
    except (ValueError, OSError) as error:
        raise DataFilesMissing(f"NotMNIST cannot be read from {images_file.parent}: {error}") from error
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise DataFilesMissing(
            f"NotMNIST: {images_file} holds images {list(images.shape)}, {labels_file} labels {list(labels.shape)}"
        )
    return ImageSet(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long())


def _members(packed: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield an archive's files and folders.

    Raises:
        ValueError: a member is a link or lies elsewhere, or the archive unpacks to much more than the published one.
    """
    unpacked = 0
    for member in packed:
        place = Path(member.name)
        if not (member.isfile() or member.isdir()) or place.is_absolute() or ".." in place.parts:
            raise ValueError(f"{member.name!r:.80} is no file or folder within it")
        unpacked += tarfile.BLOCKSIZE + member.size
        if unpacked > _MOST_UNPACKED:
            raise ValueError(f"it holds more than {_MOST_UNPACKED:,} bytes, the published archive a tenth of that")
        yield member


def _read_archive(archive: Path, shape: tuple[int, int, int]) -> ImageSet:
    """Read the published archive, unpacked into a temporary folder since the data root may not be writable."""
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            with tarfile.open(archive) as packed:
                # Before 3.11.4 there may be no filter; what the archive may hold is safe without it, too.
                packed.extraction_filter = getattr(tarfile, "data_filter", None)
                packed.extractall(unpacked, members=_members(packed))
        except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
            raise DataFilesMissing(f"NotMNIST: {archive} cannot be unpacked: {error}") from error
        folder = Path(unpacked) / _FOLDER
        if not folder.is_dir():
            raise DataFilesMissing(f"NotMNIST: {archive} holds no folder {_FOLDER}")
        try:
            return read_class_folders(folder, shape, skip_unreadable=True)
        except DataFilesMissing as error:
            inside = str(error).replace(f"{unpacked}/", "")
            raise DataFilesMissing(f"NotMNIST: {archive} cannot be used: {inside}") from error


class NotMNIST(StandardSource):
    """Letters A to J in many fonts, 28x28, with some wrong labels (Bulatov 2011).

    The first of these layouts that is found is used:

    1. ``<root>/notMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte``, unpacked or ``.gz``;
    2. ``<root>/notMNIST_small/{A..J}/*.png``, the published archive unpacked, or ``<root>/notMNIST_small.tar.gz``, the
       archive itself: 18,724 readable images, split;
    3. the ``t10k`` files of layout 1 alone, split.

    Nothing is downloaded. Default normalisation: FOT's 5-Datasets, 0.4254 and 0.4501.

    Args:
        test_share: share that becomes the test set if the files do not define one, between 0.01 and 0.99. The split is
            stratified and the same in every run. FOT's 16,853 + 1,873 samples are a share of 0.1.
        options: those of :class:`StandardSource`.

    Raises:
        ConfigError: a number that cannot work.
    """

    name = "notmnist"
    class_names = tuple("ABCDEFGHIJ")
    shape = (1, 28, 28)
    num_classes = 10
    mean = (0.4254,)
    std = (0.4501,)

    def __init__(self, test_share: float = 0.1, **options: Any) -> None:
        check_numbers(KEY, SHARES, test_share=test_share)
        self.test_share = test_share
        super().__init__(**options)

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, from the first layout found."""
        train, test = self._read_found(root)
        if (samples := len(train) + len(test)) not in _PUBLISHED:
            self.unlike_published = (
                f"{type(self).__name__} has {samples} samples; the published archive has {_PUBLISHED[0]}"
            )
        return train, test

    def _read_found(self, root: Path) -> tuple[ImageSet, ImageSet]:
        raw, folder, archive = root / "notMNIST" / "raw", root / _FOLDER, root / _ARCHIVE
        train, test = _idx_files(raw, "train"), _idx_files(raw, "t10k")
        if train and test:
            return _read_part(*train), _read_part(*test)
        if folder.is_dir():
            whole = read_class_folders(folder, self.shape, skip_unreadable=True)
            return stratified_split(self.name, whole, self.test_share)
        if archive.is_file():
            return stratified_split(self.name, _read_archive(archive, self.shape), self.test_share)
        if test:
            whole = _read_part(*test)
            _log.warning("NotMNIST: no training files in %s; its %d test samples are split", raw, len(whole))
            return stratified_split(self.name, whole, self.test_share)
        raise DataFilesMissing(
            f"NotMNIST: files are missing. Expected either\n"
            f"  {archive}: from {_ADDRESS}, or unpacked: {folder}/A to {folder}/J\nor\n"
            f"  {raw}/train-images-idx3-ubyte\n  {raw}/train-labels-idx1-ubyte\n"
            f"  {raw}/t10k-images-idx3-ubyte\n  {raw}/t10k-labels-idx1-ubyte\n"
            f"unpacked or as .gz; the t10k files alone are split in two. {WHERE_ELSE}"
        )
