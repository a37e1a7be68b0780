"""Augmentation: random changes of training images, drawn anew every time a sample is trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cfl.randomness.counter_bits import random_words_at
from cfl.randomness.generators import seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_integers

_BITS = 24
_OFFSET_MASK = (1 << _BITS) - 1


def augmentation_words(seed: int, round: int, step: int, task: int, samples: Tensor) -> Tensor:
    """``[...]`` int64: 64 random bits for each sample of a local step.

    They are a hash of (seed, round, local step, task, index of the sample in the task's training set), so that
    augmentation does not depend on cohort width, engine, processes, device or resuming. A client trains on a sample
    once per epoch, in a different step each time. Clients that share a sample and train on it in the same step share
    its bits.

    Args:
        seed: the run's seed.
        round: the round.
        step: the client's local step, from 0, or a number that stands for another moment.
        task: task of the training set, from 0.
        samples: ``[...]`` int64 indices into the task's training set.
    """
    return random_words_at(seed_for(seed, "augment", round, step, task), samples)


_MOST_PADDING = 1000


class Augmentation(ABC):
    """A random change of an image that keeps its size and its label.

    It is applied to stored images, before a stream's permutation or rotation and before normalisation, and in local
    training only. Tests and extra communication rounds use unchanged images, except those from a replay buffer.
    """

    moves_boxes: ClassVar[bool] = False
    """Whether :meth:`moved` moves boxes as images are."""

    def moved(self, boxes: Tensor, words: Tensor, height: int, width: int) -> Tensor:
        """Boxes ``[n, M, 5]`` in images changed by the same random bits ``[n]``.

        A box gets class -1 if less than a pixel of its width or height is left in the image, or if it had class -1.

        Args:
            boxes: class, left, top, right and bottom in pixels.
            words: the random bits with which the images were changed.
            height: of an image.
            width: of an image.
        """
        raise NotImplementedError

    @abstractmethod
    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        """Return changed copies of images, drawn by 64 random bits for each.

        Args:
            images: ``[n, C, H, W]`` as stored, uint8 or float32; the copies have the same type.
            words: ``[n]`` int64, the random bits.
        """


class CropFlip(Augmentation):
    """Pads with black, crops to the old size at a random position, and mirrors images with probability 1/2.

    Both offsets are uniform on ``0 .. 2 * padding`` (to within 2^-24), and independent of each other and of the
    mirroring. It equals ``RandomCrop(size, padding)`` and ``RandomHorizontalFlip()`` of torchvision on images before
    normalisation, where black is the stored value 0.

    Sources: split mini-ImageNet in FOT (Bakman et al., ICLR 2024) and CIFAR-100 in Fed-A-GEM (Dai et al., 2024), both
    with padding 4.

    Args:
        padding: pixels on each side, from 0 to 1000.
        flip: whether images are mirrored.

    Raises:
        ConfigError: ``data.augmentation.padding`` is out of range, or nothing would change.
    """

    moves_boxes = True

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        check_integers("data.augmentation", 0, at_most=_MOST_PADDING, padding=padding)
        if padding == 0 and not flip:
            raise ConfigError("data.augmentation.padding", 0, "at least 1 without flip, or data.augmentation null")
        self.padding, self.flip = padding, flip

    def draws(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First row and first column ``[n]`` int64 of the crop, and ``[n]`` bool, whether the image is mirrored."""
        places = 2 * self.padding + 1
        top, left = ((words >> shift & _OFFSET_MASK) * places >> _BITS for shift in (0, _BITS))
        return top, left, (words < 0) if self.flip else torch.zeros_like(words, dtype=torch.bool)

    def moved(self, boxes: Tensor, words: Tensor, height: int, width: int) -> Tensor:
        """See :meth:`Augmentation.moved`; boxes are cut to the crop."""
        top, left, mirrored = self.draws(words)
        shift = (torch.stack([left, top, left, top], -1) - self.padding).unsqueeze(1)
        corners = boxes[..., 1:] - shift
        flipped = torch.stack([width - corners[..., 2], corners[..., 1], width - corners[..., 0], corners[..., 3]], -1)
        corners = torch.where(mirrored[:, None, None], flipped, corners).clamp(min=0)
        corners = corners.minimum(corners.new_tensor([width, height, width, height]))
        gone = (boxes[..., 0] < 0) | (corners[..., 2:] - corners[..., :2] < 1).any(-1)
        classes = boxes[..., 0].masked_fill(gone, -1.0)
        return torch.cat([classes.unsqueeze(-1), corners.masked_fill(gone.unsqueeze(-1), 0.0)], -1)

    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        """See :meth:`Augmentation.__call__`."""
        n, channels, height, width = images.shape
        top, left, mirrored = self.draws(words)
        device, across = images.device, width + 2 * self.padding
        padded = pad(images, (self.padding,) * 4).view(-1, across)
        # Gather whole rows first, then pixels within them: much cheaper than indexing pixels by four coordinates.
        first_rows = torch.arange(n * channels, device=device).mul_(height + 2 * self.padding).view(n, channels)
        rows = (first_rows + top[:, None])[..., None] + torch.arange(height, device=device)
        columns = torch.arange(width, device=device).expand(n, width)
        columns = left[:, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
        cut = padded.index_select(0, rows.view(-1)).view(n, channels * height, across)
        return cut.gather(2, columns[:, None].expand(n, channels * height, width)).view(images.shape)
