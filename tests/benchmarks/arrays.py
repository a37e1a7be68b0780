"""Random images in place of data sets: the same file for every engine, and no download."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.works import Work

MEAN, STD = 0.5, 0.25
"""Normalisation of every channel, of ``stored / 255``."""

TEST_SIZE = 100
_COARSE = 4  # pixels of a side that share one coarse value


def data_file(folder: Path, work: Work, seed: int = 0) -> Path:
    """Return the path of the work's ``.npz`` file for :class:`cfl.data.sources.Arrays`; make the file if it is missing.

    Args:
        folder: of the file; made if it is missing.
        work: its shape, classes and sizes name the file; works that agree in them share it.
        seed: of the generator.
    """
    shape = "x".join(str(side) for side in work.shape)
    name = f"{work.stored_size}x{shape}-{work.tasks}x{work.classes}classes-{work.clients}clients-seed{seed}.npz"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        labels = training_labels(work)
        test_labels = np.arange(TEST_SIZE) % work.outputs
        temporary = path.with_name(f".{name}")
        with temporary.open("wb") as file:
            np.savez(
                file,
                train_images=random_images(rng, len(labels), work.shape),
                train_labels=labels,
                test_images=random_images(rng, TEST_SIZE, work.shape),
                test_labels=test_labels,
            )
        temporary.replace(path)
    return path


def training_labels(work: Work) -> np.ndarray:
    """``[N]`` int64: the first task's samples, then one sample per client for every other task."""
    first = np.arange(work.task_size) % work.classes
    others = [task * work.classes + np.arange(work.clients) % work.classes for task in range(1, work.tasks)]
    return np.concatenate([first, *others])


def random_images(rng: np.random.Generator, count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """``[count, C, H, W]`` uint8: coarse squares and fine noise, so that pixels are correlated as in photographs."""
    channels, height, width = shape
    lines, columns = math.ceil(height / _COARSE), math.ceil(width / _COARSE)
    images = np.empty((count, *shape), dtype=np.uint8)
    for start in range(0, count, 4096):
        part = images[start : start + 4096]
        coarse = rng.integers(0, 192, (len(part), channels, lines, columns), dtype=np.uint8)
        part[:] = coarse.repeat(_COARSE, 2).repeat(_COARSE, 3)[..., :height, :width]
        part += rng.integers(0, 64, part.shape, dtype=np.uint8)
    return images


def task_tensors(path: Path, work: Work, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples of the work's first task, as a bare loop reads them.

    Args:
        path: returned by :func:`data_file`.
        work: whose samples the file holds.
        seed: of the permutation of pixels, if the work has one.

    Returns:
        ``[N, C, H, W]`` float32, normalised and permuted, and ``[N]`` int64.
    """
    with np.load(path) as stored:
        labels, images = stored["train_labels"], stored["train_images"]
    own = np.flatnonzero(labels < work.classes)
    order = np.random.default_rng(seed).permutation(math.prod(work.shape[1:])) if work.permuted else None
    x = torch.empty(len(own), *work.shape)
    for start in range(0, len(own), 4096):
        part = images[own[start : start + 4096]]
        if order is not None:
            part = part.reshape(*part.shape[:2], -1)[..., order].reshape(part.shape)
        x[start : start + 4096] = torch.from_numpy(part).float().div_(255).sub_(MEAN).div_(STD)
    return x, torch.from_numpy(labels[own])
