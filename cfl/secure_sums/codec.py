"""Codecs: the numbers of a message as integers modulo a power of two, and back from their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from cfl.randomness.counter_normals import uniforms
from cfl.runtime.errors import ConfigError

MODULI = (32, 64)
"""Bits of the integers that are sent."""
MOST_BITS = 50
"""Bits of one message's numbers at most: with the random number that rounds them they fit into a float64."""


@dataclass(frozen=True)
class Codec:
    """How the numbers of a topic's messages become integers.

    A number x of a message with the weight w is sent as ``x w / weight / step``, rounded up or down at random such that
    its mean is exact, with ``step = range / 2^(bits - 1)``. Range and weight are powers of two, so that multiples of
    the step, such as counts, are sent exactly. Tensors of integers have a step of 1, whatever the range.

    Attributes:
        range: numbers are below it in magnitude; a power of two.
        bits: of one message's numbers, sign included.
        modulus: bits of the integers that are sent, 32 or 64; None for 32 if all sums fit, else 64.
        weight: no message has a greater weight; a power of two.
    """

    range: float
    bits: int
    modulus: int | None = None
    weight: float = 1.0

    def step(self, integers: bool = False) -> float:
        """The difference of two neighbouring numbers, of messages with the greatest weight."""
        return self.weight if integers else self.weight * self.range / 2 ** (self.bits - 1)

    @property
    def greatest(self) -> int:
        """The greatest integer that a message may hold, and minus the least."""
        return 2 ** (self.bits - 1) - 1

    def for_clients(self, topic: str, clients: int) -> Codec:
        """The codec with its modulus, for a sum of this many messages at most.

        Raises:
            ConfigError: the sum could exceed the modulus, or the weight the numbers.
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


_GRADIENTS, _FISHERS, _MOMENTS = Codec(2.0**8, 26), Codec(2.0**12, 48), Codec(2.0**20, 44)
DEFAULTS: Mapping[str, Codec] = {
    "update": Codec(2.0**4, 24),
    "scaffold": _GRADIENTS,
    "buffer gradient": _GRADIENTS,
    "fedcurv": _FISHERS,
    "ewc fisher": _FISHERS,
    "fot *": _MOMENTS,
    "base": _GRADIENTS,
    "* means": Codec(2.0**4, 24),
    "*": Codec(2.0**12, 40),
}
"""Topic, or a pattern of topics -> its codec; the first one that matches counts."""


def codec_of(topic: str, given: Mapping[str, Mapping[str, Any]], greatest_weight: float = 1.0) -> Codec:
    """The codec of a topic.

    Args:
        topic: of the messages.
        given: topic -> options that take the place of the default's.
        greatest_weight: of the topic's messages, if no option says it; rounded up to a power of two.
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
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            holds, valid = {
                "range": (number and value > 0 and math.frexp(value)[0] == 0.5, "a power of two"),
                "weight": (number and value >= 1 and math.frexp(value)[0] == 0.5, "a power of two of at least 1"),
                "bits": (isinstance(value, int) and 2 <= value <= MOST_BITS, f"an integer from 2 to {MOST_BITS}"),
                "modulus": (value in MODULI, "32 or 64"),
            }.get(name, (False, f"no option of this name; a codec has {', '.join(names)}"))
            if not holds:
                raise ConfigError(f"{key}.{name}", value, valid)


def encoded(
    codec: Codec, values: Tensor, factors: Tensor, noise: Tensor, integers: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Messages as integers.

    Args:
        codec: of their topic.
        values: ``[k, d]``, finite.
        factors: ``[k]`` float64, weights by the codec's greatest weight.
        noise: ``[k, d]`` float64 uniform in (0, 1), which rounds.
        integers: whether the tensor has integers.

    Returns:
        ``[k, d]`` int64; ``[k]`` the greatest magnitude of each message; ``[]`` the sum of squared rounding errors, in
        squares of the step.
    """
    scaled = values.to(torch.float64) * (factors * (codec.weight / codec.step(integers)))[:, None]
    whole = scaled.floor()
    rest = scaled.sub_(whole)
    up = (noise < rest).to(torch.float64)
    error = rest.sub_(up).square_().sum()
    whole += up
    if not values.shape[1]:
        return whole.long(), factors.new_zeros(len(values)), error
    return whole.long(), whole.abs().amax(1), error


def rounding_noise(keys: Tensor, count: int) -> Tensor:
    """``[k]`` int64 keys to ``[k, count]`` float64 numbers that round messages."""
    return uniforms(keys, count)


def centred(total: Tensor, modulus: int) -> Tensor:
    """Sums modulo ``2^modulus`` (int64, the upper bits of any value) as the signed integers next to 0."""
    return total if modulus == 64 else (total << (64 - modulus)) >> (64 - modulus)
