"""Surrogate data: reads, resizes, deals and iterates over unlabelled images of another data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cfl.data.sources.base import Source
from cfl.data.sources.loading import load_checked
from cfl.data.streams.sequence import enlarge
from cfl.data.types import PixelTransform
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError


def read_surrogate(source: Source, root: Path, shape: tuple[int, int, int], key: str) -> Tensor:
    """The training images of a data set as ``[N, C, H, W]`` uint8, without labels.

    Smaller images are padded with black on all sides, the odd row or column at the bottom or right; grey ones are
    repeated over the channels.

    Args:
        source: the data set.
        root: folder with its files.
        shape: ``(C, H, W)`` to deliver.
        key: key of the source in the configuration, for the error.

    Raises:
        ConfigError: if its images are larger, or their channels others, than wanted.
        DataFilesMissing: if files are absent.
    """
    train, _ = load_checked(source, root, key)
    channels, height, width = train.images.shape[1:]
    if channels not in (1, shape[0]) or height > shape[1] or width > shape[2]:
        valid = f"images that fit into {list(shape)}, the network's input: no larger, grey or of {shape[0]} channels"
        raise ConfigError(key, f"{source.name}, images of {[channels, height, width]}", valid)
    return enlarge(train, shape).images


def normalised_as(transform: PixelTransform, scale: float) -> PixelTransform:
    """A stream's normalisation for the images of another data set.

    Mean and deviation, in units of white, are the stream's; the stored value of white is the data set's. The stream's
    permutation or rotation of pixels is left out.

    Args:
        transform: transform of the stream.
        scale: the data set's stored value that means 1.0.
    """
    return PixelTransform(transform.mean, transform.std, scale)


def shards(size: int, parties: int, seed: int, purpose: str) -> list[np.ndarray]:
    """Deal ``size`` images at random, once for the whole run: per party int64 indices; sizes differ by at most one."""
    return np.array_split(numpy_generator(seed, purpose).permutation(size), parties)


def passes(shard: np.ndarray, count: int, seed: int, purpose: str, *indices: int) -> Tensor:
    """The first ``count`` images of repeated passes through a shard, each pass in a new random order.

    Args:
        shard: at least one index.
        count: number of images.
        seed: the run's seed.
        purpose: purpose of the draws.
        indices: keys of the draws, such as round and client; the number of the pass is added.

    Returns:
        ``[count]`` int64.
    """
    times = -(-count // len(shard))
    orders = [numpy_generator(seed, purpose, *indices, number).permutation(shard) for number in range(times)]
    return torch.from_numpy(np.concatenate(orders)[:count]) if orders else torch.zeros(0, dtype=torch.int64)
