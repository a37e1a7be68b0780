"""Codecs: the numbers of a message as integers modulo a power of two, and back from their sum."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfl.randomness.counter_bits import random_words
from cfl.runtime.errors import ConfigError

MODULI = (32, 64)
"""Bits of the integers that are sent."""
MOST_BITS = 50
"""Greatest number of bits of one message's numbers: a float64 holds so many, and some more behind the point."""
_NOISES = 2.0**16
"""Number of values of a random number. The mean of a rounded number is exact up to 1/131072 of a step."""
_PIECE = 2**14
"""Numbers that are encoded together; with their scratch space they take half a MiB."""
_SHIFT = 1.5 * 2.0**52
"""Adding it to a whole number below 2^51 leaves this number in the lowest bits of the float64."""
_SHIFT_BITS = np.float64(_SHIFT).view(np.int64)


@dataclass(frozen=True)
class Codec:
    """How the numbers of a topic's messages become integers.

    A number x of a message with the weight w is sent as ``x w / step``, rounded up or down at random such that its
    mean is right, with ``step = weight range / 2^(bits - 1)``. Range and weight are powers of two, so that
    multiples of the step, such as counts, are sent exactly. The step of tensors of integers is ``weight``.

    Attributes:
        range: numbers are below it in magnitude; a power of two.
        bits: bits of one message's numbers, sign included.
        modulus: bits of the integers that are sent, 32 or 64; None for 32 if all sums fit, else 64.
        weight: greatest weight that a message may have; a power of two.
    """

    range: float
    bits: int
    modulus: int | None = None
    weight: float = 1.0

    def step(self, integers: bool = False) -> float:
        """The difference between two neighbouring numbers in messages with the greatest weight."""
        return self.weight if integers else self.weight * self.range / 2 ** (self.bits - 1)

    @property
    def greatest(self) -> int:
        """The greatest magnitude of the integers in a message."""
        return 2 ** (self.bits - 1) - 1

    def for_clients(self, topic: str, clients: int) -> Codec:
        """The codec with its modulus, for sums of at most ``clients`` messages.

        Raises:
            ConfigError: the sum could exceed the modulus, or the weight exceeds the greatest integer of a message.
        """
        if self.weight > self.greatest:
            valid = f"at most {self.greatest}, or more bits: a weight is sent as one number"
            raise ConfigError(f"federated.codecs.{topic}.weight", self.weight, valid)
        needed = self.bits + math.ceil(math.log2(max(1, clients)))
        modulus = next((m for m in MODULI if needed <= m), None) if self.modulus is None else self.modulus
        if modulus is None or needed > modulus:
            valid = f"at most {(modulus or 64) - needed + self.bits} with sums over {clients} clients modulo 2^"
            raise ConfigError(f"federated.codecs.{topic}.bits", self.bits, f"{valid}{modulus or 64}")
        return replace(self, modulus=modulus)


_GRADIENTS = Codec(2.0**8, 26)
DEFAULTS: Mapping[str, Codec] = {
    "update": Codec(2.0**4, 24),
    "scaffold": _GRADIENTS,
    "buffer gradient": _GRADIENTS,
    "fedcurv": Codec(2.0**12, 48),
    "fot *": Codec(2.0**20, 44),
    "base": _GRADIENTS,
    "* means": Codec(2.0**4, 24),
    "*": Codec(2.0**12, 40),
}
"""Topic, or a pattern of topics -> its codec; the first one that matches counts."""


def codec_of(topic: str, given: Mapping[str, Mapping[str, Any]], greatest_weight: float = 1.0) -> Codec:
    """The codec of a topic.

    Args:
        topic: topic of the messages.
        given: topic -> options that replace those of the default codec.
        greatest_weight: greatest weight of the topic's messages, if no option sets it; rounded up to a power of two.
    """
    default = next(codec for pattern, codec in DEFAULTS.items() if fnmatchcase(topic, pattern))
    weight = 2.0 ** math.ceil(math.log2(max(1.0, greatest_weight)))
    return replace(replace(default, weight=weight), **given.get(topic, {}))


def check_codecs(given: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse options of codecs that cannot work.

    Raises:
        ConfigError: for the first such option.
    """
    names = ("range", "bits", "modulus", "weight")
    for topic, options in given.items():
        key = f"federated.codecs.{topic}"
        if not isinstance(options, Mapping):
            raise ConfigError(key, options, f"options by their names: {', '.join(names)}")
        for name, value in options.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            holds, valid = {
                "range": (number and value > 0 and math.frexp(value)[0] == 0.5, "a power of two"),
                "weight": (number and value >= 1 and math.frexp(value)[0] == 0.5, "a power of two of at least 1"),
                "bits": (type(value) is int and 2 <= value <= MOST_BITS, f"an integer from 2 to {MOST_BITS}"),
                "modulus": (value is None or (type(value) is int and value in MODULI), "32, 64 or null"),
            }.get(name, (False, f"no option of this name; a codec has {', '.join(names)}"))
            if not holds:
                raise ConfigError(f"{key}.{name}", value, valid)


def encoded(values: Tensor, scales: Tensor, steps: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Messages as integers: ``values * scales``, rounded up or down at random.

    Args:
        values: ``[k, d]``, finite.
        scales: ``[k, 1]`` or ``[k, d]`` float64.
        steps: ``[1]`` or ``[d]`` float64, what an integer of 1 stands for.
        keys: ``[k]`` int64, keys of the random numbers.

    Returns:
        ``[k, d + 1]`` int64 with zeros in the last column, which is for the weight; ``[k]`` float64 the greatest
        magnitude in each message; ``[]`` float64 the expected sum of squared rounding errors, which are up to a step.
    """
    count = values.shape[1]
    random = random_words(keys, -(-count // 4)).view(torch.int16)[:, :count]  # a word's lowest bits come first
    if values.device.type == "cpu":
        return _encoded_on_cpu(values, scales, steps, random)
    return _encoded(values, scales, steps, random)


def _encoded(values: Tensor, scales: Tensor, steps: Tensor, random: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scaled = values.to(torch.float64) * scales
    whole = scaled.floor()
    rest = scaled.sub_(whole)
    whole += (random.to(torch.float64) < rest * _NOISES - (_NOISES + 1) / 2).to(torch.float64)
    largest = whole.abs().amax(1) if values.shape[1] else whole.new_zeros(len(whole))
    return nn.functional.pad(whole.long(), (0, 1)), largest, ((rest - rest.square()) * steps.square()).sum()


def _encoded_on_cpu(values: Tensor, scales: Tensor, steps: Tensor, random: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as :func:`_encoded`, several times as fast: by numpy, in pieces that stay in a core's cache."""
    found = np.empty((len(values), values.shape[1] + 1), np.int64)
    found[:, -1] = 0
    largest, squares = np.zeros(len(values)), 0.0
    scratch, ones, higher = np.empty((3, _PIECE)), np.ones(_PIECE), np.empty(_PIECE, np.bool_)
    units = steps.square().numpy()
    values = values.float() if values.dtype == torch.bfloat16 else values  # numpy has no such type
    numbers, factors, noise = values.detach().numpy(), scales.numpy(), random.numpy()
    for row in range(len(values)):
        for start in range(0, values.shape[1], _PIECE):
            piece = slice(start, min(start + _PIECE, values.shape[1]))
            size = piece.stop - start
            rest, whole, other = scratch[:, :size]
            np.copyto(rest, numbers[row, piece])
            rest *= factors[row, 0] if factors.shape[1] == 1 else factors[row, piece]
            np.floor(rest, out=whole)
            rest -= whole
            if len(units) == 1:
                squares += float(rest @ ones[:size] - rest @ rest) * float(units[0])
            else:
                np.multiply(rest, rest, out=other)
                np.subtract(rest, other, out=other)
                squares += float(other @ units[piece])
            rest *= _NOISES
            rest -= (_NOISES + 1) / 2
            np.copyto(other, noise[row, piece])
            np.less(other, rest, out=higher[:size])
            np.copyto(other, higher[:size])
            whole += other
            largest[row] = max(largest[row], whole.max(), -whole.min())
            # Conversion by the bits of a float64, because numpy's takes four times as long.
            whole += _SHIFT
            np.subtract(whole.view(np.int64), _SHIFT_BITS, out=found[row, piece])
    return torch.from_numpy(found), torch.from_numpy(largest), torch.tensor(squares, dtype=torch.float64)


def centred(total: Tensor, modulus: int) -> Tensor:
    """Sums modulo ``2^modulus`` (int64 with arbitrary upper bits) as signed integers of least magnitude."""
    return total if modulus == 64 else (total << (64 - modulus)) >> (64 - modulus)
