"""Fetches network inputs by sample indices, on the device of the indices."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from cfl.data.augmentation import Augmentation, augmentation_words
from cfl.data.types import ImageSet, Task, mapped_apart
from cfl.randomness.generators import numpy_generator
from cfl.runtime.moving import moved

Moment = tuple[int, int]
"""The round and the local step in which samples are trained on."""


class Inputs:
    """The samples of all tasks of a stream as network inputs.

    Images are moved to a device once, as a whole, and stay there.

    Args:
        tasks: the stream's tasks.
        shape: ``(C, H, W)`` of an input.
        offsets: per task, the output index of its first class.
        augmentation: random change of the images in local training, or None.
        seed: the run's seed.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        shape: tuple[int, int, int],
        offsets: Sequence[int],
        augmentation: Augmentation | None,
        seed: int,
    ) -> None:
        self._tasks, self._shape, self._offsets = tasks, shape, offsets
        self._augmentation, self._seed = augmentation, seed
        self._on_device: dict[tuple[int, torch.device], ImageSet] = {}
        self._mapped: tuple[tuple[int, torch.device], ImageSet] | None = None
        self._test_orders: dict[tuple[int, torch.device], Tensor] = {}
        self._lock = threading.Lock()
        # Per task, the first task with the same stored images and normalisation: their samples are fetched together.
        alike: dict[tuple[Hashable, ...], int] = {}
        kinds = [(id(task.train), *task.transform.normalisation) for task in tasks]
        self._alike = torch.tensor([alike.setdefault(kind, task) for task, kind in enumerate(kinds)])

    def of_task(self, task: int, index: Tensor, moment: Moment | None = None) -> tuple[Tensor, Tensor]:
        """Training samples of a task.

        Args:
            task: from 0.
            index: ``[...]`` int64 into its training set.
            moment: when they are trained on, which keys the augmentation; None for no augmentation.

        Returns:
            ``[..., C, H, W]`` float32 inputs and ``[...]`` int64 output indices, or ``[..., D]`` or ``[..., M, 5]``
            float32 where labels are numbers or boxes.
        """
        flat = index.reshape(-1)
        if self._augmentation is None or moment is None:
            data = self._training_set(task, index.device)
            x = self._tasks[task].transform.normalised(data.images.index_select(0, flat))
            y = data.labels.index_select(0, flat) + self._offsets[task]
        else:
            x, y = self.uncached(task, flat, augmentation_words(self._seed, *moment, task, flat))
        return x.view((*index.shape, *x.shape[1:])), y.view((*index.shape, *y.shape[1:]))

    def of_tasks(
        self,
        tasks: Tensor,
        index: Tensor,
        moment: Moment | None = None,
        words: Tensor | None = None,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training samples of several tasks.

        The call does not wait for an accelerator if tasks, indices and bits are on the CPU.

        Args:
            tasks: ``[...]`` int64.
            index: ``[...]`` int64 into each sample's task's training set.
            moment: as for :meth:`of_task`.
            words: ``[...]`` int64 random bits of the augmentation, in place of those of ``moment``.
            device: device of the result; None for the indices'.

        Returns:
            As :meth:`of_task`.
        """
        flat, of = index.reshape(-1), tasks.reshape(-1)
        if words is None and moment is not None and self._augmentation is not None:
            words = self.words(tasks, index, moment)
        bits = None if words is None else words.reshape(-1)
        device = index.device if device is None else device
        if not self._alike.any():
            x, y = self._stored_alike(0, of, flat, bits, device)
            return x.view((*index.shape, *x.shape[1:])), y.view((*index.shape, *y.shape[1:]))
        x = torch.empty((len(flat), *self._shape), device=device)
        labels = self._tasks[0].train.labels
        y = labels.new_empty((len(flat), *labels.shape[1:]), device=device)
        for first, rows in _rows_by_task(self._alike.to(of.device)[of]):
            own, there = None if bits is None else bits[rows], moved(rows, device)
            x[there], y[there] = self._stored_alike(first, of[rows], flat[rows], own, device)
        return x.view((*index.shape, *x.shape[1:])), y.view((*index.shape, *y.shape[1:]))

    def uncached(self, task: int, index: Tensor, words: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`of_task`, for ``[n]`` indices and random bits, without caching the task's transformed images."""
        images, y = self._augmented(task, index, words)
        return self._tasks[task].transform(images), y + self._offsets[task]

    def _stored_alike(
        self, first: int, tasks: Tensor, index: Tensor, words: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`uncached`, on ``device``, for tasks that differ from ``first`` only in pixel maps and outputs."""
        found, which = tasks.unique(return_inverse=True)
        own = found.tolist()
        index, words = moved(index, device), None if words is None else moved(words, device)
        if len(own) <= 1:
            return self.uncached(own[0] if own else first, index, words)
        images, y = self._augmented(first, index, words)
        which, offsets = moved(which, device), moved(torch.tensor([self._offsets[task] for task in own]), device)
        images = mapped_apart(images, [self._tasks[task].transform for task in own], which)
        y = y + offsets[which].view(-1, *(1,) * (y.ndim - 1))
        return self._tasks[first].transform.normalised(images), y

    def _augmented(self, task: int, index: Tensor, words: Tensor | None) -> tuple[Tensor, Tensor]:
        """Stored images and labels, augmented if random bits are given; boxes move with their images."""
        data = self._resident(self._tasks[task].train, index.device)
        images, y = data.images.index_select(0, index), data.labels.index_select(0, index)
        if self._augmentation is None or words is None:
            return images, y
        moved_y = self._augmentation.moved(y, words, *images.shape[-2:]) if y.ndim == 3 else y
        return self._augmentation(images, words), moved_y

    def labels(self, tasks: Tensor, index: Tensor) -> Tensor:
        """``[n]`` int64 output index of training samples of ``[n]`` tasks, without their images."""
        of_first = self._tasks[0].train.labels
        found = of_first.new_empty((len(index), *of_first.shape[1:]), device=index.device)
        for task, rows in _rows_by_task(tasks):
            labels = self._resident(self._tasks[task].train, index.device).labels
            found[rows] = labels[index[rows]] + self._offsets[task]
        return found

    def words(self, tasks: Tensor, index: Tensor, moment: Moment) -> Tensor:
        """The random bits ``[...]`` int64 with which samples ``[...]`` of some tasks are augmented in a step."""
        flat, of = index.reshape(-1), tasks.reshape(-1)
        words = torch.empty_like(flat)
        for task, rows in _rows_by_task(of):
            words[rows] = augmentation_words(self._seed, *moment, task, flat[rows])
        return words.view(index.shape)

    def of_test_set(self, task: int, part: slice, device: torch.device, shuffled: bool) -> tuple[Tensor, Tensor]:
        """``[n, C, H, W]`` inputs and ``[n]`` output indices of a part of a task's test set.

        Args:
            task: from 0.
            part: the samples, as a slice.
            device: device of the result.
            shuffled: whether the test set is in a random order, keyed by (seed, task), instead of the stored one.
        """
        data = self._resident(self._tasks[task].test, device)
        rows = self._test_rows(task, part, device, shuffled)
        return self._tasks[task].transform(data.images[rows]), data.labels[rows] + self._offsets[task]

    def owners_of_test_set(self, task: int, part: slice, device: torch.device, shuffled: bool) -> Tensor | None:
        """``[n]`` int64, the client that owns each sample; None if the data do not say. See :meth:`of_test_set`."""
        clients = self._resident(self._tasks[task].test, device).clients
        return None if clients is None else clients[self._test_rows(task, part, device, shuffled)]

    def _test_rows(self, task: int, part: slice, device: torch.device, shuffled: bool) -> Tensor | slice:
        return self._test_order(task, device)[part] if shuffled else part

    def _test_order(self, task: int, device: torch.device) -> Tensor:
        if (task, device) not in self._test_orders:
            order = numpy_generator(self._seed, "evaluate", task).permutation(len(self._tasks[task].test))
            self._test_orders[task, device] = torch.from_numpy(order).to(device)
        return self._test_orders[task, device]

    def _resident(self, images: ImageSet, device: torch.device) -> ImageSet:
        """The set's tensors on ``device``, moved once."""
        key = (id(images), device)
        if key not in self._on_device:
            clients = None if images.clients is None else images.clients.to(device)
            self._on_device[key] = ImageSet(images.images.to(device), images.labels.to(device), clients)
        return self._on_device[key]

    def _training_set(self, task: int, device: torch.device) -> ImageSet:
        """A task's training set on ``device`` with its pixel map applied; cached for the last task used.

        Permuting or rotating every batch anew takes several times as long as its other processing.
        """
        with self._lock:  # several threads that train clients call this at the same time
            if self._mapped is None or self._mapped[0] != (task, device):
                data = self._resident(self._tasks[task].train, device)
                self._mapped = None
                self._mapped = (task, device), ImageSet(self._tasks[task].transform.mapped(data.images), data.labels)
            return self._mapped[1]


def _rows_by_task(tasks: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each distinct task of ``tasks`` ``[n]`` with the positions of its samples."""
    for task in tasks.unique().tolist():
        yield task, (tasks == task).nonzero().squeeze(1)
