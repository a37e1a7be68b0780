"""Gradients give away labels and images."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cfl.methods.components import gradient_inversion
from cfl.methods.components.gradient_inversion import (
    GradientEncoder,
    encoder_gradient,
    invert_gradients,
    recovered_label,
)

SHAPE = (1, 6, 6)


def encoder_of(seed: int, outputs: int = 5) -> GradientEncoder:
    return GradientEncoder(SHAPE, outputs, torch.Generator().manual_seed(seed)).double()


def image_of(seed: int) -> Tensor:
    """Pixels uniform on -1 .. 1."""
    return 2 * torch.rand(SHAPE, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64) - 1


def gradient_of(encoder: GradientEncoder, image: Tensor, label: int) -> dict[str, Tensor]:
    return encoder_gradient(encoder, image, torch.tensor(label))


def inverted(encoder: GradientEncoder, image: Tensor, label: int, steps: int, seed: int, keep: int = 1) -> Tensor:
    """``[min(keep, steps), C, H, W]``, of one image."""
    gradients = {name: gradient[None] for name, gradient in gradient_of(encoder, image, label).items()}
    generators = [torch.Generator().manual_seed(seed)]
    return invert_gradients(encoder, gradients, torch.tensor([label]), SHAPE, steps, generators, keep)[0]


def psnr(found: Tensor, image: Tensor) -> float:
    """Peak signal to noise in dB; the range of pixels is 2."""
    return 10 * math.log10(4 / float((found - image).square().mean()))


@pytest.mark.parametrize("seed", range(5))
def test_the_label_is_in_the_last_layer(seed: int) -> None:
    for label in range(5):
        assert recovered_label(gradient_of(encoder_of(seed), image_of(seed), label)) == label


@pytest.mark.parametrize("seed", range(3))
def test_the_image_is_in_the_gradient(seed: int) -> None:
    encoder, image = encoder_of(seed), image_of(seed)
    found = inverted(encoder, image, 3, 10, seed, keep=3)
    assert found.shape == (3, *SHAPE)
    assert psnr(found[-1], image) > 60
    assert psnr(image_of(seed + 1), image) < 15  # what another image scores


def test_iterates_come_closer() -> None:
    """The last ``keep`` iterates are returned, in their order."""
    encoder, image = encoder_of(0), image_of(0)
    gradient = gradient_of(encoder, image, 1)

    def distance(x: Tensor) -> float:
        found = gradient_of(encoder, x, 1)
        return sum(float((found[n] - g).square().sum()) for n, g in gradient.items())

    def run(steps: int, keep: int) -> Tensor:
        return inverted(encoder, image, 1, steps, 5, keep)

    whole = run(4, 9)
    assert len(whole) == 4
    distances = [distance(x) for x in whole]
    assert distances == sorted(distances, reverse=True)
    assert torch.equal(run(4, 2), whole[2:])
    assert torch.equal(run(3, 1)[0], whole[2])


def one_by_one(encoder: GradientEncoder, gradient: dict[str, Tensor], label: int, steps: int, seed: int) -> Tensor:
    """All iterates of torch's optimizer, by differentiating twice."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
    optimizer = torch.optim.LBFGS([x], line_search_fn="strong_wolfe")
    parameters = {name: p.detach().requires_grad_() for name, p in encoder.named_parameters()}

    def distance() -> Tensor:
        optimizer.zero_grad()
        logits = torch.func.functional_call(encoder, parameters, (x[None],))
        loss = torch.logsumexp(logits[0], 0) - logits[0, label]
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        total = sum(((f - gradient[name]) ** 2).sum() for name, f in zip(parameters, found, strict=True))
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    iterates = []
    for _ in range(steps):
        optimizer.step(distance)  # type: ignore[no-untyped-call]
        iterates.append(x.detach().clone())
    return torch.stack(iterates)


def test_images_are_those_of_one_inversion_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """All iterates agree, for equal and unequal labels and for more images than are inverted at once."""
    monkeypatch.setattr(gradient_inversion, "AT_ONCE", 2)
    encoder, labels, steps = encoder_of(4), [3, 0, 3], 6
    each = [gradient_of(encoder, image_of(seed), label) for seed, label in enumerate(labels)]
    gradients = {name: torch.stack([gradient[name] for gradient in each]) for name in each[0]}
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    found = invert_gradients(encoder, gradients, torch.tensor(labels), SHAPE, steps, generators, steps)
    assert found.shape == (3, steps, *SHAPE)
    for seed, (gradient, label) in enumerate(zip(each, labels, strict=True)):
        expected = one_by_one(encoder, gradient, label, steps, seed)
        torch.testing.assert_close(found[seed], expected, rtol=0, atol=1e-7)
        assert float((expected[0] - expected[-1]).abs().max()) > 1e-3


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    """Against central differences."""
    encoder, image = encoder_of(2), image_of(2)
    gradient = gradient_of(encoder, image, 4)
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
