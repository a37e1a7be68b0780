"""mini-ImageNet cut for continual learning: every class in both sets, as arrays or as image files."""

from __future__ import annotations

from pathlib import Path

from cfl.data.sources.files import WHERE_ELSE
from cfl.data.sources.folder import ImageFolder, read_class_folders
from cfl.data.sources.npy_images import read_npy_images
from cfl.data.sources.split import stratified_split
from cfl.data.sources.standard import StandardSource
from cfl.data.types import ImageSet
from cfl.runtime.errors import DataFilesMissing

_ADDRESS = "https://unimore365-my.sharepoint.com/:u:/g/personal/263133_unimore_it/EYLmey_IMdVPtGCrCBx_CCMBToexGLjdFVy5mz5mo3Wpcg?download=1"


class MiniImageNet(StandardSource):
    """100 classes of ImageNet photographs, 500 + 100 of each, 84x84 in colour (Vinyals et al., 2016).

    The set was made for few-shot learning with disjoint classes for training and testing; here every class is in both
    sets, 500 images for training and 100 for testing. The first of these layouts that is found is used:

    1. ``<root>/MINIIMG/{train,test}_{x,y}.npy``: images ``[N, 84, 84, 3]`` as unsigned bytes, or as floats that are
       bytes / 255, and integer labels ``[N]``. These are mammoth's files (aimagelab, data set ``seq-miniimg``), which
       FOT used; classes are numbered as there.
    2. ``<root>/mini-imagenet/{train,test}/<class>/``: image files; classes are numbered by name.
    3. ``<root>/mini-imagenet/images/<class>/``: all image files; a sixth of each class becomes the test set, the same
       in every run.

    Image files of another size are scaled to 84x84. Layouts 2 and 3 number the classes differently from FOT's files.
    Layout 3 also divides the images differently. Nothing is downloaded. Default normalisation: FOT's, that of the
    training pixels: 0.4731, 0.4491, 0.4038 and 0.2729, 0.2656, 0.2795.
    """

    name = "mini-imagenet"
    title = "MiniImageNet"
    shape = (3, 84, 84)
    num_classes = 100
    mean = (0.47313006, 0.44905752, 0.40378186)
    std = (0.27292014, 0.26559181, 0.27953038)
    published = (50_000, 10_000)
    tests_may_lack_classes = False
    others = "these are not its files, which have every class in both sets, unlike few-shot splits"

    def read(self, root: Path) -> tuple[ImageSet, ImageSet]:
        """Training and test set, from the first layout found."""
        arrays, folder = root / "MINIIMG", root / "mini-imagenet"
        files = [arrays / f"{part}_{kind}.npy" for part in ("train", "test") for kind in "xy"]
        if all(file.is_file() for file in files):
            train, test = (read_npy_images(self.title, x, y, side=84) for x, y in (files[:2], files[2:]))
            return train, test
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return ImageFolder(str(folder), list(self.shape)).read(Path())
        if (folder / "images").is_dir():
            return stratified_split(self.name, read_class_folders(folder / "images", self.shape), 1 / 6)
        states = "\n".join(f"  {file} ({'present' if file.is_file() else 'missing'})" for file in files)
        raise DataFilesMissing(
            f"MiniImageNet: files are missing. Expected either\n{states}\n"
            f"from mammoth's archive miniImagenet.zip, to be fetched with a browser: {_ADDRESS}\nor\n"
            f"  {folder}/train and {folder}/test: in each one folder per class, with 500 and 100 images\nor\n"
            f"  {folder}/images: one folder per class, with 600 images to be divided\n{WHERE_ELSE}"
        )
