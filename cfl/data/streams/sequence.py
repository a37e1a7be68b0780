"""Several data sets, one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import pad

from cfl.data.sources.base import Source
from cfl.data.sources.loading import check_announced, load_checked
from cfl.data.streams.base import Stream
from cfl.data.streams.same_numbers import check_same_numbers, number_of_each
from cfl.data.types import ImageSet, PixelTransform, Task
from cfl.runtime.errors import ConfigError


class Sequence(Stream):
    """One task per data set, every image brought to the common size and number of channels.

    Smaller images are padded with black (stored value 0) on all sides, before normalisation; where the difference is
    odd the extra row or column is at the bottom or right. Where any source has colour, grey images are repeated over
    the channels. Each source keeps its own normalisation. That is the 5-Datasets benchmark of FOT (Bakman et al.,
    ICLR 2024), whose grey-image constants are computed on the padded images.

    Args:
        sources: the data sets in the order of their tasks, at least one.

    Raises:
        ConfigError: ``data.stream.sources`` when it is empty, when numbers of channels cannot be reconciled, or when
            sources of boxes differ in shape or classes.
    """

    shared_labels = False

    def __init__(self, sources: list[Source]) -> None:
        self.shape = common_shape(sources)
        _check_boxes(sources)
        self.sources = sources
        self.name = "-".join(["sequence", *(source.name for source in sources)])
        self.num_tasks = len(sources)
        self.classes_per_task = [source.num_classes for source in sources]

    def source_of(self, task: int) -> Source:
        """See :meth:`Stream.source_of`."""
        return self.sources[task]

    def class_names(self, root: Path, seed: int) -> list[tuple[str, ...]]:
        """See :meth:`Stream.class_names`; each name begins with that of its data set."""
        return [tuple(f"{source.name} {name}" for name in source.names(root)) for source in self.sources]

    def check_numbers(self, root: Path, shared_outputs: bool) -> None:
        """See :meth:`Stream.check_numbers`. Tables with some common columns are refused where tasks share outputs."""
        if shared_outputs:
            valid = "data sets that number them alike, or data.scenario: task, where tasks share no outputs"
            classes = [number_of_each(source.names(root)) for source in self.sources]
            check_same_numbers("class", self.sources, classes, valid)
        check_columns(self.sources, self.shape[2], root, shared_outputs)

    def tasks(self, root: Path, seed: int) -> list[Task]:
        """See :meth:`Stream.tasks`; nothing here is drawn at random."""
        tasks = []
        for source in self.sources:
            train, test = load_checked(source, root, "data.stream.sources")
            train, test = enlarge(train, self.shape), enlarge(test, self.shape)
            transform = repeat_channels(source.transform(), self.shape[0])
            tasks.append(Task(source.name, train, test, source.num_classes, transform))
        return _with_equally_many_boxes(tasks) if self.targets == "boxes" else tasks


def common_shape(sources: list[Source]) -> tuple[int, int, int]:
    """``(C, H, W)`` that holds the images of all of these sources.

    Raises:
        ConfigError: ``data.stream.sources`` when there is none or when numbers of channels cannot be reconciled.
    """
    if not sources:
        raise ConfigError("data.stream.sources", [], "a list of at least one source")
    for source in sources:
        check_announced(source, "data.stream.sources")
    channels = {source.shape[0] for source in sources}
    if len(channels - {1}) > 1:
        raise ConfigError(
            "data.stream.sources",
            [f"{source.name}: {source.shape[0]} channels" for source in sources],
            "sources with one channel or with the same number of channels",
        )
    return max(channels), max(s.shape[1] for s in sources), max(s.shape[2] for s in sources)


def check_columns(sources: list[Source], width: int, root: Path, shared_outputs: bool) -> None:
    """Refuse tables whose columns would be other inputs of the network in one than in another.

    Args:
        sources: the data sets, of which some may be tables.
        width: of the common shape.
        root: folder with the data sets' files.
        shared_outputs: whether tasks share outputs. Tables with some common columns are then refused, too.

    Raises:
        ConfigError: ``data.stream.sources``, naming the first column or number that differs.
    """
    columns = [source.columns(root) for source in sources]
    places = [number_of_each(names, _before(width - len(names))) for names in columns]
    valid = "tables with the same columns in one order; zeros are put on both sides of shorter rows"
    check_same_numbers("column", sources, places, valid, all_common=not shared_outputs)


def _check_boxes(sources: list[Source]) -> None:
    """Refuse sources of boxes that differ in shape or in the order of their classes.

    Boxes would not move with padded images, and one output would stand for different classes.
    """
    boxes = [source for source in sources if source.targets == "boxes"]
    for what, valid, values in (
        ("shape", "sources of boxes with the same shape, to which each scales its images", [s.shape for s in boxes]),
        ("classes", "sources of boxes with the same classes in the same order", [s.class_names for s in boxes]),
    ):
        if len({*values}) > 1:
            given = [f"{s.name}: {what} {list(v or ())}" for s, v in zip(boxes, values, strict=True)]
            raise ConfigError("data.stream.sources", given, valid)


def _with_equally_many_boxes(tasks: list[Task]) -> list[Task]:
    """The tasks with the same number of rows for boxes, so that images of several tasks can be put together."""
    most = max(part.labels.shape[1] for task in tasks for part in (task.train, task.test))

    def filled(samples: ImageSet) -> ImageSet:
        missing = most - samples.labels.shape[1]
        none = samples.labels.new_tensor([-1.0, 0, 0, 0, 0]).expand(len(samples), missing, 5)
        return replace(samples, labels=torch.cat([samples.labels, none], 1)) if missing else samples

    return [replace(task, train=filled(task.train), test=filled(task.test)) for task in tasks]


def _before(difference: int) -> int:
    """How much of a difference in size is put before an image (left, above); the rest is put behind it."""
    return difference // 2


def enlarge(images: ImageSet, shape: tuple[int, int, int]) -> ImageSet:
    """Images ``[N, c, h, w]`` centred on black ``[N, C, H, W]``; repeated channels share memory."""
    channels, height, width = shape
    stored = images.images
    down, right = height - stored.shape[2], width - stored.shape[3]
    if down or right:
        left, above = _before(right), _before(down)
        stored = pad(stored, (left, right - left, above, down - above))
    return replace(images, images=stored.expand(-1, channels, -1, -1))


def repeat_channels(transform: PixelTransform, channels: int) -> PixelTransform:
    """Repeat the normalisation of grey images for images with several equal channels."""
    if len(transform.mean) == channels:
        return transform
    return PixelTransform(transform.mean * channels, transform.std * channels, transform.scale, transform.pixel_map)
