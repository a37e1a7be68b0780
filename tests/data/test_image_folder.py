"""Folders of images: sizes, classes and pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cfl.data.sources import (
    CIFAR10,
    CIFAR100,
    KMNIST,
    EMNISTLetters,
    FashionMNIST,
    ImageFolder,
    NotMNIST,
)
from cfl.runtime.errors import ConfigError, DataFilesMissing


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


def test_an_absent_folder_is_named_before_the_option_that_can_replace_it(tmp_path):
    with pytest.raises(ConfigError) as refused:
        _ = ImageFolder(str(tmp_path / "none"), [1, 4, 4]).num_classes
    assert refused.value.valid.startswith(f"a folder: {tmp_path / 'none' / 'train'} does not exist. ")
    assert "data.stream.source.num_classes" in refused.value.valid
    assert ImageFolder(str(tmp_path / "none"), [1, 4, 4], num_classes=3).num_classes == 3


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
