"""Data types that sources, streams and partitions exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_AT_A_TIME = 256


@dataclass(frozen=True)
class ImageSet:
    """Stored images with labels, before normalisation.

    Attributes:
        images: ``[N, C, H, W]`` uint8, or float32 where the data set holds numbers that bytes cannot.
        labels: ``[N]`` int64, values ``0 .. num_classes - 1``; or float32 ``[N, D]``, numbers to
            predict, or ``[N, M, 5]``, boxes: class (-1 where there is none), left, top, right and bottom in pixels.
        clients: ``[N]`` int64, the client, from 0, that owns each sample; None if the data set does not say.
        seconds: ``[N]`` float64, how long each sample lasts in a recording; None if the data set does not say.
        tasks: ``[N]`` int64, the task, from 0, of each sample; None if the data set does not say.
        client_names: name or number of each client in the files, ascending; empty if ``clients`` has these numbers.
    """

    images: Tensor
    labels: Tensor
    clients: Tensor | None = None
    seconds: Tensor | None = None
    tasks: Tensor | None = None
    client_names: tuple[str, ...] | tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.ndim != 4:
            found = f"{self.images.dtype} {list(self.images.shape)}"
            raise TypeError(f"images must be uint8 or float32 [N, C, H, W], got {found}")
        kind = (self.labels.dtype, self.labels.ndim)
        if kind not in ((torch.int64, 1), (torch.float32, 2), (torch.float32, 3)) or len(self.labels) != len(
            self.images
        ):
            count, found = len(self.images), f"{self.labels.dtype} {list(self.labels.shape)}"
            raise TypeError(
                f"labels must be int64 [N={count}], float32 [N={count}, D] or [N={count}, M, 5], got {found}"
            )
        for name, dtype in (("clients", torch.int64), ("seconds", torch.float64), ("tasks", torch.int64)):
            held = getattr(self, name)
            if held is not None and (held.dtype, held.shape) != (dtype, self.labels.shape[:1]):
                wanted = f"{str(dtype).removeprefix('torch.')} [N={len(self.images)}]"
                raise TypeError(f"{name} must be {wanted}, got {held.dtype} {list(held.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def groups(self) -> Tensor:
        """``[N]`` int64: classes by which samples are dealt and counted; all 0 if labels are numbers or boxes."""
        return self.labels if self.labels.ndim == 1 else torch.zeros(len(self), dtype=torch.int64)

    def subset(self, index: Tensor) -> ImageSet:
        """The samples at ``index`` ([M] int64), copied."""
        told = (self.clients, self.seconds, self.tasks)
        clients, seconds, tasks = (None if of is None else of[index] for of in told)
        return ImageSet(self.images[index], self.labels[index], clients, seconds, tasks, self.client_names)


class PixelTransform:
    """Converts stored values to network input, per batch, on the images' device.

    ``input = (stored / scale - mean) / std`` per channel, after an optional pixel map that is the same for
    every channel: ``out[.., c, p] = in[.., c, pixel_map[p]]`` with ``p`` running over the ``H * W`` pixels in
    row-major order and ``-1`` meaning black (stored value 0). A permutation and a nearest-neighbour rotation
    are both pixel maps.

    Args:
        mean: per channel, in units of ``stored / scale``.
        std: per channel, in units of ``stored / scale``.
        scale: stored value that means 1.0 (255 for ordinary images, 16 for scikit-learn's digits).
        pixel_map: ``[H * W]`` int64, or None for none.
    """

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], scale: float = 255.0, pixel_map: Tensor | None = None
    ) -> None:
        self.mean, self.std, self.scale, self.pixel_map = mean, std, scale, pixel_map
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = {}

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Mean, standard deviation and scale."""
        return tuple(self.mean), tuple(self.std), self.scale

    def with_pixel_map(self, pixel_map: Tensor) -> PixelTransform:
        """The same normalisation behind another pixel map ``[H * W]``."""
        return PixelTransform(self.mean, self.std, self.scale, pixel_map)

    def _constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        if device not in self._on_device:
            std = torch.tensor(self.std, dtype=torch.float64)
            mean = torch.tensor(self.mean, dtype=torch.float64)
            factor = (1.0 / (self.scale * std)).float().view(-1, 1, 1).to(device)
            offset = (-mean / std).float().view(-1, 1, 1).to(device)
            index = outside = None
            if self.pixel_map is not None:
                index = self.pixel_map.clamp(min=0).to(device)
                if bool((self.pixel_map < 0).any()):
                    outside = (self.pixel_map < 0).to(device)
            self._on_device[device] = (factor, offset, index, outside)
        return self._on_device[device]

    def __call__(self, images: Tensor) -> Tensor:
        """Convert stored images ``[..., C, H, W]`` to network input, float32 of the same shape."""
        return self.normalised(self.mapped(images))

    def mapped(self, images: Tensor) -> Tensor:
        """Apply the pixel map alone to ``[..., C, H, W]``; return the images themselves if there is none."""
        _, _, index, outside = self._constants(images.device)
        if index is None:
            return images
        flat = _pixels(images.flatten(-2), index)
        if outside is not None:
            flat = flat.masked_fill(outside, 0)
        return flat.view(images.shape)

    def normalised(self, images: Tensor) -> Tensor:
        """Apply the normalisation alone to stored images ``[..., C, H, W]``; return a float32 copy."""
        factor, offset, _, _ = self._constants(images.device)
        return images.to(torch.float32, copy=True).mul_(factor).add_(offset)


def mapped_apart(images: Tensor, transforms: Sequence[PixelTransform], which: Tensor) -> Tensor:
    """Apply to each image ``[n, C, H, W]`` the pixel map of its own transform, as :meth:`PixelTransform.mapped`.

    Args:
        images: as stored.
        transforms: transforms with the pixel maps; their normalisation is not used.
        which: ``[n]`` int64, position of each image's transform in ``transforms``.
    """
    pixels = images.shape[-2] * images.shape[-1]
    own = [transform._constants(images.device)[2:] for transform in transforms]
    same = torch.arange(pixels, device=images.device)
    index = torch.stack([same if index is None else index for index, _ in own])[which].unsqueeze(1)
    flat = images.flatten(-2)
    flat = flat.gather(-1, index.expand(flat.shape))
    if any(outside is not None for _, outside in own):
        none = torch.zeros_like(same, dtype=torch.bool)
        black = torch.stack([none if outside is None else outside for _, outside in own])[which].unsqueeze(1)
        flat = flat.masked_fill(black, 0)
    return flat.view(images.shape)


def _pixels(images: Tensor, index: Tensor) -> Tensor:
    """``[..., P]`` with the pixels in the order of ``index`` ``[P]``."""
    if images.device.type != "cpu":
        return images.index_select(-1, index)
    # On CPUs a few images at a time, which stay in the cache. This takes a quarter of the time.
    rows = images.reshape(-1, images.shape[-1])
    found = torch.empty_like(rows)
    for part, target in zip(rows.split(_AT_A_TIME), found.split(_AT_A_TIME), strict=True):
        torch.index_select(part, -1, index, out=target)
    return found.view(images.shape)


@dataclass(frozen=True)
class Task:
    """One task of a stream, with labels local to the task.

    Attributes:
        name: for tables and pictures, e.g. ``permutation 3`` or ``cifar100 classes 20-29``.
        train: training samples, labels ``0 .. num_classes - 1`` within the task.
        test: test samples, labelled likewise.
        num_classes: number of classes of this task, or number D of values to predict.
        transform: stored values to network input.
    """

    name: str
    train: ImageSet
    test: ImageSet
    num_classes: int
    transform: PixelTransform

    @property
    def num_groups(self) -> int:
        """Number of the classes by which samples are dealt and counted (:attr:`ImageSet.groups`)."""
        return self.num_classes if self.train.labels.ndim == 1 else 1
