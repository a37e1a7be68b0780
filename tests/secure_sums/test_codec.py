"""Codecs: exact where numbers are multiples of the step, unbiased elsewhere, and nothing cut off."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.secure_sums.codec import DEFAULTS, Codec, centred, check_codecs, codec_of, encoded, rounding_noise


def integers(codec: Codec, values: Tensor, weights: list[float], seed: int = 0, whole: bool = False) -> Tensor:
    noise = rounding_noise(torch.arange(len(values)) + 1000 * seed, values.shape[1])
    factors = torch.tensor([weight / codec.weight for weight in weights], dtype=torch.float64)
    return encoded(codec, values, factors, noise, whole)[0]


@pytest.mark.parametrize("pattern", DEFAULTS)
def test_counts_are_exact_under_every_default(pattern: str) -> None:
    codec = DEFAULTS[pattern]
    values = torch.tensor([[0.0, 1.0, -1.0, 0.5, 7.0, -13.0]])
    found = integers(codec, values, [1.0]) * codec.step()
    assert found.tolist() == values.double().tolist()


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 17.0, 32.0]])
def test_every_number_is_off_by_less_than_a_step_of_the_greatest_weight(weights: list[float]) -> None:
    codec = Codec(4.0, 12, weight=32.0 if max(weights) > 1 else 1.0)
    values = torch.rand(3, 500, generator=torch_generator(0, "values")) * 7.9 - 3.95
    found = integers(codec, values, weights)
    for row, weight, sent in zip(values.tolist(), weights, found.tolist(), strict=True):
        for value, integer in zip(row, sent, strict=True):  # exactly
            error = Fraction(integer) * Fraction(codec.step()) - Fraction(value) * Fraction(weight)
            assert abs(error) < codec.step()


def test_rounding_has_the_right_mean() -> None:
    codec = Codec(1.0, 4)
    values = torch.full((4000, 3), 0.0) + torch.tensor([0.3, -0.3, 0.01])
    mean = integers(codec, values, [1.0] * 4000).double().mean(0) * codec.step()
    spread = codec.step() / 2 / 4000**0.5  # of the mean, at most
    assert (mean - values[0]).abs().max() < 5 * spread


def test_rounding_depends_on_the_client_alone() -> None:
    codec, values = Codec(1.0, 8), torch.rand(4, 50, generator=torch_generator(0, "values")) * 0.9
    together = integers(codec, values, [1.0] * 4)
    keys = torch.arange(4)
    apart = [
        encoded(codec, values[[row]], torch.ones(1, dtype=torch.float64), rounding_noise(keys[[row]], 50), False)[0]
        for row in (2, 0, 3, 1)
    ]
    assert torch.equal(together[[2, 0, 3, 1]], torch.cat(apart))


def test_tensors_of_integers_have_a_step_of_one() -> None:
    values = torch.tensor([[300, -5, 0]])
    assert integers(Codec(1.0, 12), values, [1.0], whole=True).tolist() == values.tolist()


@pytest.mark.parametrize("modulus", [32, 64])
def test_sums_wrap_at_the_modulus_and_come_back_signed(modulus: int) -> None:
    numbers = [-5, 0, 3, 2 ** (modulus - 1) - 1, -(2 ** (modulus - 1))]
    wrapped = [number % 2**modulus for number in numbers]
    as_int64 = torch.tensor([w - 2**64 if w >= 2**63 else w for w in wrapped])
    assert centred(as_int64, modulus).tolist() == numbers


def test_the_modulus_is_the_smallest_that_holds_the_sum() -> None:
    assert Codec(1.0, 24).for_clients("update", 256).modulus == 32
    assert Codec(1.0, 24).for_clients("update", 257).modulus == 64
    worst = 256 * Codec(1.0, 24).greatest
    assert worst < 2**31
    with pytest.raises(ConfigError, match=r"federated.codecs.update.bits = 24 .*at most 23 .* 257 clients .*2\^32"):
        Codec(1.0, 24, 32).for_clients("update", 257)
    with pytest.raises(ConfigError, match=r"federated.codecs.update.weight = 256.0 .*at most 127"):
        Codec(1.0, 8, weight=256.0).for_clients("update", 2)


def test_options_take_the_place_of_defaults() -> None:
    assert codec_of("update", {}) == DEFAULTS["update"]
    assert codec_of("update", {"update": {"bits": 10}}, 70) == Codec(16.0, 10, weight=128.0)
    assert codec_of("fot sketch", {}) == DEFAULTS["fot *"]
    assert codec_of("of a plug-in", {}) == DEFAULTS["*"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"range": 3}, r"federated.codecs.update.range = 3 .*a power of two"),
        ({"range": float("nan")}, "a power of two"),
        ({"bits": 1}, r"update.bits = 1 .*an integer from 2 to 50"),
        ({"bits": 8.5}, "an integer from 2 to 50"),
        ({"modulus": 16}, r"update.modulus = 16 .*32 or 64"),
        ({"weight": 0.5}, "at least 1"),
        ({"step": 1}, r"update.step = 1 .*no option of this name"),
        (3, r"federated.codecs.update = 3 .*range, bits, modulus, weight"),
    ],
)
def test_options_that_cannot_work_are_refused(options: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_codecs({"update": options})  # type: ignore[dict-item]
