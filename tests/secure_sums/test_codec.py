"""Codecs: exact for multiples of the step, unbiased for other numbers, and nothing is clipped."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from cfl.randomness.counter_bits import random_words
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError
from cfl.secure_sums.codec import DEFAULTS, Codec, _encoded, centred, check_codecs, codec_of, encoded

ONE = torch.ones(1, dtype=torch.float64)


def integers(codec: Codec, values: Tensor, weights: list[float], whole: bool = False) -> Tensor:
    scales = torch.tensor(weights, dtype=torch.float64)[:, None] / codec.step(whole)
    return encoded(values, scales, ONE, torch.arange(len(values)))[0][:, :-1]


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
    scale = torch.tensor([[1 / codec.step()]], dtype=torch.float64)
    apart = [encoded(values[[row]], scale, ONE, torch.tensor([row]))[0][:, :-1] for row in (2, 0, 3, 1)]
    assert torch.equal(together[[2, 0, 3, 1]], torch.cat(apart))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("each", [False, True], ids=["one step", "a step for each number"])
def test_all_devices_get_the_same_integers(dtype: torch.dtype, each: bool) -> None:
    """The CPU's computation, in pieces, gives the integers of the computation of other devices."""
    generator = torch_generator(0, "values")
    values = (torch.randn(3, 40_000, generator=generator) * 1e4).to(dtype)
    values[:, ::3] = values[:, ::3].round()
    scales = torch.full((3, 40_000 if each else 1), 2.0**20, dtype=torch.float64)
    scales[:, 1::2] *= 4
    steps = torch.arange(1, 40_001) / 1e4 if each else torch.full((1,), 3.0)
    found, largest, squares = encoded(values, scales, steps.double(), torch.arange(3))
    words = random_words(torch.arange(3), 10_000).view(torch.int16)
    elsewhere = _encoded(values, scales, steps.double(), words)
    assert torch.equal(found, elsewhere[0])
    assert torch.equal(largest, elsewhere[1])
    assert largest.tolist() == found.abs().amax(1).tolist()
    torch.testing.assert_close(squares, elsewhere[2])


def test_the_expected_error_is_that_of_many_messages() -> None:
    codec, values = Codec(1.0, 6), torch.rand(1, 20_000, generator=torch_generator(1, "values")) * 0.9
    scales, step = torch.full((1, 1), 1 / codec.step(), dtype=torch.float64), torch.tensor([codec.step()]).double()
    found, _, squares = encoded(values, scales, step, torch.tensor([5]))
    error = found[:, :-1] * codec.step() - values.double()
    assert abs(float(error.square().sum() / squares) - 1) < 0.03


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
        ({"bits": True}, "an integer from 2 to 50"),
        ({"modulus": 32.0}, r"update.modulus = 32.0 .*32, 64 or null"),
        ({"range": 2**2000}, "a power of two"),
        ({"modulus": 16}, r"update.modulus = 16 .*32, 64 or null"),
        ({"weight": 0.5}, "at least 1"),
        ({"step": 1}, r"update.step = 1 .*no option of this name"),
        (3, r"federated.codecs.update = 3 .*range, bits, modulus, weight"),
    ],
)
def test_options_that_cannot_work_are_refused(options: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_codecs({"update": options})  # type: ignore[dict-item]
