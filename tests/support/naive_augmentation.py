"""An augmented training image written plainly: padded, cut and mirrored by itself, with torchvision."""

from __future__ import annotations

import torch
from torch import Tensor

from cfl.data.augmentation import CropFlip, augmentation_words
from cfl.data.datamodule import FederatedDataModule


def augmented(data: FederatedDataModule, task: int, sample: int, round: int, step: int) -> Tensor:
    """``[C, H, W]`` network input: a task's training sample as a local step of a round sees it under ``CropFlip``."""
    from torchvision.transforms import functional

    assert isinstance(data.augmentation, CropFlip)
    word = augmentation_words(data.seed, round, step, task, torch.tensor([sample]))
    top, left, mirrored = (int(draw) for draw in data.augmentation.draws(word))
    image = data.tasks[task].train.images[sample]
    padded = functional.pad(image, [data.augmentation.padding] * 4)
    cut = functional.crop(padded, top, left, *image.shape[1:])
    return data.tasks[task].transform((functional.hflip(cut) if mirrored else cut)[None])[0]
