import logging
import math

import pytest
import torch

from cfl.methods.components.gaussian_mechanism import GaussianMechanism
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError


@pytest.mark.parametrize("clip", [1.0, 0.25, 7.0])
@pytest.mark.parametrize("length", [0.01, 0.9999, 1.0, 30.0])
def test_clipping_bounds_the_frobenius_norm_and_keeps_the_direction(clip: float, length: float) -> None:
    a = torch.randn(40, 60, generator=torch_generator(0, "clip"), dtype=torch.float64)
    a *= length * clip / a.norm()
    out = GaussianMechanism(0.5, 1e-5, clip).clipped(a)
    naive = math.sqrt(sum(v * v for v in out.flatten().tolist()))
    assert naive == pytest.approx(min(length, 1.0) * clip, rel=1e-12)
    assert torch.allclose(out / out.norm(), a / a.norm(), rtol=0, atol=1e-14)


def test_clipping_leaves_zero_and_short_tensors_alone() -> None:
    mechanism = GaussianMechanism(0.5, 1e-5)
    assert torch.equal(mechanism.clipped(torch.zeros(3, 4)), torch.zeros(3, 4))
    short = torch.full((3, 4), 0.1)
    assert torch.equal(mechanism.clipped(short), short)


def test_sigma_is_the_published_bound() -> None:
    # Mini-ImageNet's private run: epsilon 5, delta 1e-5, clip 1, 25 clients; log(1.25e5) = 11.736069016284437
    paper = GaussianMechanism(5.0, 1e-5, sigma_rule="paper")
    assert paper.sigma(25) ** 2 == pytest.approx(11.736069016284437 / (25 * 25), rel=1e-12)
    # Dwork and Roth, Theorem A.1, one client, sensitivity 2: sigma^2 = 2 log(1.25/delta) 2^2 / epsilon^2
    standard = GaussianMechanism(0.5, 1e-5, clip=2.0, sigma_rule="standard")
    assert standard.sigma(1) ** 2 == pytest.approx(2 * 11.736069016284437 * 16, rel=1e-12)


@pytest.mark.parametrize("num_clients", [1, 7, 64])
def test_the_standard_rule_has_twice_the_papers_variance(num_clients: int) -> None:
    paper = GaussianMechanism(0.3, 1e-6, 1.7, "paper").sigma(num_clients)
    standard = GaussianMechanism(0.3, 1e-6, 1.7, "standard").sigma(num_clients)
    assert (standard / paper) ** 2 == pytest.approx(2, rel=1e-14)


@pytest.mark.parametrize("rule", ["paper", "standard"])
def test_the_noise_of_the_sum_has_the_total_variance(rule: str) -> None:
    clients, d, s, clip, epsilon, delta = 10, 300, 400, 1.5, 0.8, 1e-4
    mechanism = GaussianMechanism(epsilon, delta, clip, rule)  # type: ignore[arg-type]
    total, clipped = torch.zeros(d, s, dtype=torch.float64), torch.zeros(d, s, dtype=torch.float64)
    for client in range(clients):
        a = (client + 1) * torch.randn(d, s, generator=torch_generator(1, "data", client)) / 1e3
        total += mechanism.privatise(a, torch_generator(1, "noise", client), clients)
        clipped += a.double() * min(1.0, clip / a.double().norm().item())
    noise = total - clipped
    variance = {"paper": 1, "standard": 2}[rule] * math.log(1.25 / delta) * clip**2 / epsilon**2
    entries = d * s
    # four standard errors of the mean and of the variance of `entries` independent normal draws
    assert abs(noise.mean().item()) < 4 * math.sqrt(variance / entries)
    assert noise.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / entries))
    # white: no direction of the matrix stands out beyond the Marchenko-Pastur edge
    edge = math.sqrt(variance) * (math.sqrt(d) + math.sqrt(s))
    assert torch.linalg.matrix_norm(noise, 2).item() < 1.03 * edge


def test_noise_is_named_by_its_generator_and_the_input_stays() -> None:
    mechanism = GaussianMechanism(0.5, 1e-5)
    a = torch.full((5, 6), 2.0)
    one = mechanism.privatise(a, torch_generator(0, "noise", 0), 3)
    again = mechanism.privatise(a, torch_generator(0, "noise", 0), 3)
    other = mechanism.privatise(a, torch_generator(0, "noise", 1), 3)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(a, torch.full((5, 6), 2.0))
    assert one.dtype == a.dtype
    assert mechanism.privatise(a.double(), torch_generator(0, "noise", 0), 3).dtype == torch.float64


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("epsilon", {"epsilon": 0.0}),
        ("epsilon", {"epsilon": math.nan}),
        ("epsilon", {"epsilon": math.inf}),
        ("delta", {"delta": 0.0}),
        ("delta", {"delta": 1.0}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": -1.0}),
        ("sigma_rule", {"sigma_rule": "tight"}),
    ],
)
def test_bad_settings_name_their_key(key: str, settings: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        GaussianMechanism(**({"epsilon": 0.5, "delta": 1e-5} | settings))
    assert caught.value.key == f"methods.fot.mechanism.{key}"


def test_an_epsilon_beyond_the_proof_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        GaussianMechanism(1.0, 1e-5)
        assert not caplog.records
        GaussianMechanism(5.0, 1e-5)
    assert "epsilon = 5" in caplog.text


@pytest.mark.parametrize("clip", [0.25, 1.0, 4.0])
def test_the_ledgers_noise_is_in_multiples_of_the_bound(clip: float) -> None:
    """Privacy depends on noise over bound alone: with epsilon, delta and rule fixed, on no bound."""
    noise = GaussianMechanism(0.5, 1e-5, clip).noise(3, "all", "")
    assert noise.multiplier == pytest.approx(math.sqrt(2 * 11.736069016284437) / 0.5, rel=1e-12)
    assert (noise.sensitivity, noise.parts) == (clip, 3)
