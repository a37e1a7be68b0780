"""The AC-GAN: its critic is any classifier, and its generator makes images of any size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from cfl.models import ACGAN, MADE, MLP, AlexNet, PromptedViT, ResNet18, SmallCNN, num_parameters
from cfl.models.acgan import enlarged
from cfl.runtime.errors import ConfigError


@pytest.mark.parametrize("classifier", [partial(MLP, dropout=0.0), partial(AlexNet, dropout=0.0)])
def test_as_a_classifier_it_is_the_classifier(classifier: Any) -> None:
    """Its logits are those of the classifier with the same weights, and the head keeps the name ``head``."""
    torch.manual_seed(0)
    plain = classifier((3, 20, 20), 6)
    network = ACGAN((3, 20, 20), 6, classifier, noise_dim=4, widths=[5])
    renamed = {n if n.startswith("head.") else f"trunk.{n}": t for n, t in plain.state_dict().items()}
    assert set(renamed) == {n for n in network.state_dict() if not n.startswith(("generator.", "realness."))}
    network.load_state_dict(renamed, strict=False)
    x = torch.randn(3, 3, 20, 20)
    assert torch.equal(network(x), plain(x))
    assert torch.equal(network.judge(x)[1], plain(x))
    expected = plain.features(x) @ network.realness.weight[0] + network.realness.bias
    torch.testing.assert_close(network.judge(x)[0], expected)


@pytest.mark.parametrize("side", [(1, 1), (4, 7), (28, 28), (32, 32), (84, 84), (33, 21)])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_images_of_any_size_within_the_bound(kind: Any, side: tuple[int, int]) -> None:
    torch.manual_seed(0)
    network = ACGAN((2, *side), 3, partial(MLP, hidden=[2]), kind, [16, 12, 8], noise_dim=5, bound=0.1)
    noise, y = torch.randn(6, 5), torch.tensor([0, 0, 1, 1, 2, 2])
    assert network.generate(noise, y).shape == (6, 2, *side)
    assert float(network.generate(noise, y).detach().abs().max()) <= 0.1 + 1e-6
    with network.generating():
        images, again = network.generate(noise, y), network.generate(noise[:1].expand(6, -1), y)
    assert network.generator.training
    assert torch.allclose(again[0], again[1], atol=1e-6)  # the same noise and class
    assert not torch.allclose(again[0], again[2], atol=1e-6)  # another class
    assert not torch.allclose(images[0], images[1], atol=1e-6)  # other noise


def test_maps_grow_by_two_to_the_size_of_the_image() -> None:
    sizes = {}
    for side in (32, 84):
        with torch.device("meta"):
            network = ACGAN((3, side, side), 10, partial(MLP, hidden=[2]), "conv")
        seen: list[int] = []
        for module in network.generator.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, x, y, seen=seen: seen.append(y.shape[-1]))
        network.generate(torch.empty(1, 100, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta"))
        sizes[side] = [network.generator.start[-1], *seen]  # type: ignore[union-attr, index]
    assert sizes == {32: [4, 8, 16, 32], 84: [11, 21, 42, 84]}


def test_enlarged_repeats_pixels() -> None:
    x = torch.randn(2, 3, 2, 5)
    assert torch.equal(enlarged(x), x.repeat_interleave(2, 2).repeat_interleave(2, 3))


@pytest.mark.parametrize(
    ("shape", "outputs", "options", "parameters"),
    [
        # 784-400-400-400 with 10 outputs and 1; 110-256-512-784, normalised twice
        ((1, 28, 28), 10, {}, 638_810 + 401 + 111 * 256 + 257 * 512 + 513 * 784 + 2 * (256 + 512)),
        ((1, 28, 28), 10, {"generator_norm": "none"}, 638_810 + 401 + 111 * 256 + 257 * 512 + 513 * 784),
        # the AlexNet without biases; (110 + 90) to 256 maps of 4 x 4, 256-128-64-3 maps, normalised three times
        (
            (3, 32, 32),
            100,
            {"classifier": AlexNet, "generator_kind": "conv"},
            6_704_128 + 2049 + 201 * 4096 + 128 * (2304 + 1) + 64 * (1152 + 1) + 3 * (576 + 1) + 2 * (256 + 128 + 64),
        ),
    ],
)
def test_sizes(shape: tuple[int, int, int], outputs: int, options: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        assert num_parameters(ACGAN(shape, outputs, **options)) == parameters


@pytest.mark.parametrize(
    "options",
    [
        {"classifier": partial(MLP, hidden=[7], dropout=0.0)},
        {"classifier": partial(SmallCNN, dropout=0.0), "generator_kind": "conv"},
    ],
)
def test_stacked_generators_and_critics_equal_separate_ones(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    networks = [ACGAN((2, 17, 19), 4, widths=[6, 5], noise_dim=3, **options).double() for _ in range(3)]
    parameters, buffers = stack_module_state(networks)  # type: ignore[arg-type]
    noise, y = torch.randn(3, 5, 3, dtype=torch.float64), torch.randint(4, (3, 5))

    class Judged(nn.Module):
        def __init__(self, network: ACGAN) -> None:
            super().__init__()
            self.network = network

        def forward(self, noise: Tensor, y: Tensor) -> Tensor:
            real, classes = self.network.judge(self.network.generate(noise, y))
            return torch.cat([real.unsqueeze(1), classes], 1)

    def one(p: dict[str, Tensor], b: dict[str, Tensor], noise: Tensor, y: Tensor) -> Tensor:
        return functional_call(Judged(networks[0]), {f"network.{n}": t for n, t in {**p, **b}.items()}, (noise, y))

    stacked = vmap(one)(parameters, buffers, noise, y)
    separate = torch.stack([Judged(n)(z, c) for n, z, c in zip(networks, noise, y, strict=True)])
    torch.testing.assert_close(stacked, separate)
    gradients = torch.autograd.grad(stacked.square().sum(), list(parameters.values()))
    separate.square().sum().backward()
    for name, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, torch.stack([network.get_parameter(name).grad for network in networks]))
    for name, statistics in buffers.items():
        torch.testing.assert_close(statistics, torch.stack([network.get_buffer(name) for network in networks]))


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_in_use_an_image_depends_on_its_own_noise_alone(kind: Any) -> None:
    """In use, an image depends on its own noise only. In training, the generator normalises by the whole batch."""
    torch.manual_seed(0)
    network = ACGAN((1, 9, 9), 3, partial(MLP, hidden=[2]), kind, [4, 5], noise_dim=3).double()
    noise, y = torch.randn(8, 3).double(), torch.randint(3, (8,))
    for _ in range(300):  # until the running statistics are those of this batch
        network.generate(noise, y)
    before = {name: tensor.clone() for name, tensor in network.named_buffers()}
    with network.generating():
        together, alone = (
            network.generate(noise, y),
            torch.cat([network.generate(noise[i : i + 1], y[i : i + 1]) for i in range(8)]),
        )
    torch.testing.assert_close(alone, together)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.named_buffers())
    assert set(network.generator_names) == {n for n in network.state_dict() if n.startswith("generator.")}
    hidden = {}
    for norm in network.generator.norms:  # type: ignore[union-attr]
        norm.register_forward_hook(lambda norm, _, y: hidden.update({norm: y}))
    network.generate(noise, y)
    assert len(hidden) == 2
    for y_ in hidden.values():
        flat = y_.transpose(0, 1).flatten(1)
        torch.testing.assert_close(flat.mean(1), torch.zeros(len(flat)).double(), rtol=0, atol=1e-9)
        assert (flat.var(1, correction=0) < 1 + 1e-9).all()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"generator_kind": "deconv"}, "generator_kind"),
        ({"widths": [4, 0]}, "widths"),
        ({"widths": [], "generator_kind": "conv"}, "widths"),
        ({"generator_norm": "layer"}, "generator_norm"),
        ({"noise_dim": 0}, "noise_dim"),
        ({"bound": 0.0}, "bound"),
        ({"classifier": ACGAN}, "classifier"),
        ({"classifier": lambda shape, _: MADE(shape, 16)}, "classifier"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ACGAN((1, 4, 4), 3, **options)
    assert caught.value.key == f"model.network.{key}"


def test_the_critic_needs_a_linear_head() -> None:
    class Headless(MLP):
        def __init__(self, shape: tuple[int, int, int], outputs: int) -> None:
            super().__init__(shape, outputs)
            self.head = nn.Sequential(self.head)  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Headless, whose head is Sequential.*a network with self.head = nn.Linear"):
        ACGAN((1, 4, 4), 3, Headless)


def test_a_frozen_transformer_cannot_be_the_critic() -> None:
    vit = partial(PromptedViT, image_size=4, patch_size=2, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=4)
    with pytest.raises(ConfigError, match=r"classifier = 'PromptedViT, which has a frozen .*MLP, SmallCNN, AlexNet or"):
        ACGAN((1, 4, 4), 3, vit)


def test_a_residual_network_with_batch_statistics_can_be_the_critic() -> None:
    network = ACGAN((3, 20, 17), 5, partial(ResNet18, width=2, norm="batch_no_stats", stem_stride=2), "conv")
    real, classes = network.judge(network.generate(torch.randn(4, 100), torch.arange(4)))
    assert (real.shape, classes.shape) == ((4,), (4, 5))
    assert all(name.startswith("generator.") for name, _ in network.named_buffers())
