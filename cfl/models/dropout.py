"""Dropout whose masks are a pure function of a key, the sample's row and the unit.

Torch draws masks from one stream per device, so that a client's masks would depend on the other clients of its cohort,
on their order and on the device. Here the random bits are a hash of a counter: the same for every cohort width, number
of threads or processes, and device. It is also faster: integer arithmetic on eight bytes at a time, where torch's
generator draws one number per unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from cfl.models.evaluation import evaluation_mode
from cfl.randomness.counter_bits import random_words
from cfl.runtime.errors import ConfigError

_Module = TypeVar("_Module", bound=nn.Module)

_ROUND_UP = 8  # random bytes per 64-bit word


class _CountedDropout(_DropoutNd):
    """Base class of the counted layers; see :class:`CountedDropout`."""

    # On the class, so that a layer converted in place has them too.
    _drawn: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self._drawn is None:
            return super().forward(input)
        if len(self._drawn) != len(input):
            raise ValueError(f"dropout masks of {len(self._drawn)} samples do not fit a batch of {len(input)}")
        return input * self._drawn


class CountedDropout(_CountedDropout, nn.Dropout):
    """``nn.Dropout`` that uses the mask set by :func:`dropout_masks`; without one it behaves as ``nn.Dropout``."""


class CountedDropout2d(_CountedDropout, nn.Dropout2d):
    """``nn.Dropout2d``, which drops whole maps, with masks set in the same way; see :class:`CountedDropout`."""


_COUNTED: dict[type[nn.Module], type[_CountedDropout]] = {nn.Dropout: CountedDropout, nn.Dropout2d: CountedDropout2d}


def convert_dropout(module: _Module) -> _Module:
    """Make every ``nn.Dropout`` and ``nn.Dropout2d`` in ``module`` a counted one, in place; returns ``module``.

    Only the class of the layer objects changes. Subclasses of the two are not changed.
    """
    for layer in module.modules():
        if type(layer) in _COUNTED:
            layer.__class__ = _COUNTED[type(layer)]
    return module


@dataclass(frozen=True)
class _Site:
    """One counted layer of a network.

    Attributes:
        name: as in ``named_modules``.
        shape: of one sample's mask, ``(units,)``, ``(C, H, W)`` or any other, such as ``(positions, units)``.
        start: number of its first unit within its group.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def units(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class _Group:
    """Layers with the same dropout probability, whose masks are drawn together.

    Attributes:
        bits: random bits compared per unit, 8 or 16.
        threshold: a unit is kept if its bits, as an unsigned number, are below this.
        start: first word of the group in a sample's row of words.
        words: number of the group's words.
        sites: the layers.
    """

    bits: int
    threshold: int
    start: int
    words: int
    sites: tuple[_Site, ...]

    @property
    def scale(self) -> float:
        """One over the probability that a unit is kept, so that every unit keeps its expected value."""
        return 2**self.bits / self.threshold


class DropoutMasks:
    """Draws the masks of all counted layers of a network at once.

    A unit is kept with probability ``1 - p`` rounded to a multiple of 1/65536 (exact for 0.5 or 0.25), and scaled by
    one over this rounded probability. The units of a map are counted in the order (H, W, C).

    Args:
        network: with counted layers (:func:`convert_dropout`), each used at most once in a forward pass.
        input_shape: ``(C, H, W)`` of one sample.

    Raises:
        ConfigError: a counted layer is used more than once, or drops everything.
    """

    def __init__(self, network: nn.Module, input_shape: Sequence[int]) -> None:
        layers = {n: m for n, m in network.named_modules() if isinstance(m, _CountedDropout) and m.p > 0}
        if everything := [name for name, layer in layers.items() if layer.p == 1]:
            raise ConfigError("model.network", f"dropout layer {everything[0]} with p = 1", "p below 1")
        shapes = _mask_shapes(network, layers, input_shape) if layers else {}
        rates: dict[int, list[str]] = {}
        for name in shapes:
            keep = min(max(round((1 - layers[name].p) * 65536), 1), 65535)
            rates.setdefault(keep, []).append(name)
        groups, first_word = [], 0
        for keep, names in rates.items():
            sites, units = [], 0
            for name in names:
                sites.append(_Site(name, shapes[name], units))
                units += sites[-1].units
            bits = 8 if keep % 256 == 0 else 16
            words = -(-units * (bits // 8) // _ROUND_UP)
            groups.append(_Group(bits, keep >> (16 - bits), first_word, words, tuple(sites)))
            first_word += words
        self._groups = tuple(groups)
        self._words = first_word

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def words_per_sample(self) -> int:
        """64-bit random words that one sample's masks take."""
        return self._words

    def draw(self, keys: Tensor, samples: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Masks of one training step of k clients.

        Args:
            keys: ``[k]`` int64, one per client and step.
            samples: batch size B; row b of a client is the same whatever B is.
            dtype: of the masks.

        Returns:
            layer name -> ``[k, B, ...]``, shaped as the layer's input (of images with the channels last in memory), 0
            where dropped and the layer's scale where kept.
        """
        if not self._groups:
            return {}
        words = random_words(keys, samples * self._words).view(len(keys), samples, self._words)
        masks = {}
        for group in self._groups:
            part = words[..., group.start : group.start + group.words]
            if group.bits == 8:
                bits, threshold = part.view(torch.uint8), group.threshold
            else:  # torch cannot compare unsigned 16-bit numbers; signed ones are as random
                bits, threshold = part.view(torch.int16), group.threshold - 2**15
            kept = torch.empty(bits.shape, dtype=dtype, device=bits.device)
            torch.lt(bits, threshold, out=kept).mul_(group.scale)
            for site in group.sites:
                mask = kept[..., site.start : site.start + site.units]
                if len(site.shape) == 3:
                    channels, height, width = site.shape
                    mask = mask.view(len(keys), samples, height, width, channels).permute(0, 1, 4, 2, 3)
                elif len(site.shape) != 1:
                    mask = mask.unflatten(-1, site.shape)
                masks[site.name] = mask
        return masks

    def draw_for_one(self, key: int, samples: int, like: Tensor) -> dict[str, Tensor]:
        """As :meth:`draw` for one client: layer name -> ``[B, ...]``, of the type and on the device of ``like``."""
        if not self:
            return {}  # without a copy of the key to the device
        keys = torch.tensor([key], dtype=torch.int64, device=like.device)
        return {name: mask[0] for name, mask in self.draw(keys, samples, like.dtype).items()}


@torch.no_grad()
def _mask_shapes(
    network: nn.Module, layers: dict[str, _CountedDropout], input_shape: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Shape of one sample's mask per layer, in the order in which the network uses them; without unused layers."""
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, whole_maps: bool) -> object:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            x = inputs[0] if inputs else named["input"]
            if name in shapes:
                used = f"dropout layer {name}, used more than once in a forward pass"
                raise ConfigError("model.network", used, "a dropout layer of its own for each use")
            if len(x) != 1:
                used = f"dropout layer {name}, whose input of one sample is {list(x.shape)}"
                raise ConfigError("model.network", used, "inputs with the batch first (batch_first=True)")
            one = tuple(x.shape[1:])
            shapes[name] = (one[0], *[1] * (len(one) - 1)) if whole_maps else one

        return hook

    handles = [
        layer.register_forward_pre_hook(
            record(name, isinstance(layer, nn.Dropout2d)),  # type: ignore[arg-type]
            with_kwargs=True,
        )
        for name, layer in layers.items()
    ]
    some = next(network.parameters())
    try:
        with evaluation_mode(network):
            network(torch.zeros(1, *input_shape, dtype=some.dtype, device=some.device))
    finally:
        for handle in handles:
            handle.remove()
    return shapes


@contextmanager
def dropout_masks(network: nn.Module, masks: dict[str, Tensor]) -> Iterator[None]:
    """Within the context, the named layers of ``network`` drop by these masks.

    Other tensors that are drawn in every step (:mod:`cfl.models.step_draws`) are set in the same way.

    Enter it around the forward pass, inside the function given to ``torch.func.vmap`` if the masks are mapped.

    Args:
        network: holds the layers.
        masks: layer name -> ``[B, ...]``, one client's masks of :meth:`DropoutMasks.draw`, or other drawn tensors.
    """
    layers = [(network.get_submodule(name), mask) for name, mask in masks.items()]
    try:
        for layer, mask in layers:
            layer._drawn = mask
        yield
    finally:
        for layer, _ in layers:
            layer._drawn = None  # type: ignore[assignment]
