"""Gradients give away labels and images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cfl.methods.components.gradient_inversion import (
    GradientEncoder,
    encoder_gradient,
    invert_gradient,
    recovered_label,
)

SHAPE = (1, 6, 6)


def encoder_of(seed: int, outputs: int = 5) -> GradientEncoder:
    return GradientEncoder(SHAPE, outputs, torch.Generator().manual_seed(seed)).double()


def image_of(seed: int) -> Tensor:
    """Pixels uniform on -1 .. 1."""
    return 2 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64) - 1


def psnr(found: Tensor, image: Tensor) -> float:
    """Peak signal to noise in dB; the range of pixels is 2."""
    return 10 * math.log10(4 / float((found - image).square().mean()))


@pytest.mark.parametrize("seed", range(5))
def test_the_label_is_in_the_last_layer(seed: int) -> None:
    for label in range(5):
        assert recovered_label(encoder_gradient(encoder_of(seed), image_of(seed), label)) == label


@pytest.mark.parametrize("seed", range(3))
def test_the_image_is_in_the_gradient(seed: int) -> None:
    encoder, image = encoder_of(seed), image_of(seed)
    gradient = encoder_gradient(encoder, image, 3)
    generator = torch.Generator().manual_seed(seed)
    found = invert_gradient(encoder, gradient, 3, SHAPE, 10, generator, keep=3)
    assert found.shape == (3, *SHAPE)
    assert psnr(found[-1], image) > 60
    assert psnr(image_of(seed + 1), image) < 15  # what another image scores


def test_iterates_come_closer() -> None:
    """The last ones are kept, in their order; the first image is the generator's."""
    encoder, image = encoder_of(0), image_of(0)
    gradient = encoder_gradient(encoder, image, 1)

    def distance(x: Tensor) -> float:
        found = encoder_gradient(encoder, x, 1)
        return sum(float((found[n] - g).square().sum()) for n, g in gradient.items())

    def run(steps: int, keep: int) -> Tensor:
        return invert_gradient(encoder, gradient, 1, SHAPE, steps, torch.Generator().manual_seed(5), keep)

    whole = run(4, 9)
    assert len(whole) == 4
    distances = [distance(x) for x in whole]
    assert distances == sorted(distances, reverse=True)
    assert torch.equal(run(4, 2), whole[2:])
    assert torch.equal(run(3, 1)[0], whole[2])


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    """Against central differences."""
    encoder, image = encoder_of(2), image_of(2)
    gradient = encoder_gradient(encoder, image, 4)
    assert set(gradient) == {n for n, _ in encoder.named_parameters()}

    def loss() -> float:
        with torch.no_grad():
            logits = encoder(image[None])[0].tolist()
        return math.log(sum(math.exp(z) for z in logits)) - float(logits[4])

    for name, parameter in encoder.named_parameters():
        flat = parameter.data.view(-1)
        for place in (0, len(flat) - 1):
            before, values = float(flat[place]), []
            for step in (1e-6, -1e-6):
                flat[place] = before + step
                values.append(loss())
            flat[place] = before
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(gradient[name].view(-1)[place]), abs=1e-7)


def test_the_encoder_belongs_to_its_seed() -> None:
    first, again, other = encoder_of(1), encoder_of(1), encoder_of(2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)
    assert all(bool((p.abs() <= 0.5).all()) for p in first.parameters())
    assert first(torch.zeros(2, *SHAPE, dtype=torch.float64)).shape == (2, 5)
