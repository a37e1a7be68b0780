"""The prompted transformer, compared with torchvision's and with the best of all choices of prompts."""

from __future__ import annotations

import copy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models import VisionTransformer

from cfl.models import PromptedViT, num_parameters
from cfl.models.copies import networks_for_threads
from cfl.models.vit import PromptPool
from cfl.runtime.errors import ConfigError

SIZES = {"image_size": 12, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 12}
POOL = {"pool_size": 5, "prompt_length": 3, "top_k": 2}


def small(seed: int = 0, shape: tuple[int, int, int] = (3, 12, 12), **options: Any) -> PromptedViT:
    torch.manual_seed(seed)
    return PromptedViT(shape, 4, **{**SIZES, **POOL, **options})


def images(shape: tuple[int, ...] = (6, 3, 12, 12)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def theirs(network: PromptedViT) -> Any:
    """torchvision's module with the network's frozen weights, as torchvision itself would evaluate it."""
    return copy.deepcopy(network.backbone.vit).eval()


def written_out(network: PromptedViT, x: Tensor) -> tuple[Tensor, list[tuple[int, ...]], Tensor]:
    """Features, chosen prompts and their keys' cosines, sample by sample, for images of the transformer's size."""
    vit, keys = theirs(network), network.pool.keys.detach()
    features, choices, cosines = [], [], []
    with torch.no_grad():
        for image in x:
            query = vit(image[None])[0]  # the class feature, because there is no head
            all_cosines = torch.stack([query @ key / (query.norm() * key.norm()) for key in keys])
            subsets = combinations(range(len(keys)), network.top_k)
            best = max(subsets, key=lambda chosen: float(all_cosines[list(chosen)].sum()))
            choices.append(best)
            cosines.append(all_cosines[list(best)].sort(descending=True).values)
            patches = vit._process_input(image[None])
            tokens = torch.cat([vit.class_token, patches], 1) + vit.encoder.pos_embedding
            prompts = torch.cat([network.pool.prompts[s] for s in best])[None]
            # Here prompts follow the image's tokens, in the network they precede them: the order does not matter.
            encoded = vit.encoder.ln(vit.encoder.layers(torch.cat([tokens, prompts], 1)))
            features.append(encoded[0, tokens.shape[1] :].mean(0))
    return torch.stack(features), choices, torch.stack(cosines)


def test_features_and_cosines_are_those_written_out() -> None:
    network = small().double()
    x = images()
    features, choices, cosines = written_out(network, x)
    assert len(set(choices)) > 1  # else the choice would not be tested
    found, found_cosines = network.prompted(x)
    torch.testing.assert_close(found, features, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found_cosines, cosines, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(network(x), features @ network.head.weight.T + network.head.bias, rtol=1e-10, atol=1e-12)


def test_images_of_other_sizes_are_scaled_and_grey_ones_are_three_equal_channels() -> None:
    network, grey = small().double(), small(shape=(1, 5, 9)).double()
    x = images((3, 1, 5, 9))
    scaled = torch.nn.functional.interpolate(x, (12, 12), mode="bilinear", align_corners=False)
    torch.testing.assert_close(grey(x), network(scaled.repeat(1, 3, 1, 1)), rtol=1e-12, atol=1e-12)


def test_equal_cosines_choose_the_first_prompts() -> None:
    pool = PromptPool(6, 1, 3, 4)
    with torch.no_grad():
        pool.prompts.copy_(torch.arange(6.0).view(6, 1, 1).expand(6, 1, 4))
        pool.keys.copy_(torch.tensor([[1.0, 0, 0, 0], [2, 0, 0, 0], [0, 1, 0, 0], [5, 0, 0, 0], [3, 0, 0, 0], [0] * 4]))
    prompts, cosines = pool(torch.tensor([[7.0, 0, 0, 0], [0, 0, 1, 0], [-1, 0, 0, 0]]))
    assert prompts[:, :, 0].tolist() == [[0, 1, 3], [0, 1, 2], [2, 5, 0]]
    assert cosines.tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, -1]]


def test_only_chosen_prompts_and_keys_learn_and_the_transformer_never() -> None:
    network = small().double()
    x = images((1, 3, 12, 12))
    (chosen,) = written_out(network, x)[1]
    before = copy.deepcopy(network.backbone.vit.state_dict())
    features, cosines = network.prompted(x)
    network.head(features).square().sum().backward(retain_graph=True)
    assert network.pool.keys.grad is None  # logits depend on keys only by the choice of prompts
    cosines.sum().backward()
    for gradient in (network.pool.prompts.grad, network.pool.keys.grad):
        assert gradient is not None
        moved = gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist()
        assert tuple(moved) == chosen
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    optimizer.step()
    after = network.backbone.vit.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(p.grad is None and not p.requires_grad for p in network.backbone.vit.parameters())


def test_gradients_are_numerical_ones() -> None:
    network = small().double()
    x = images((2, 3, 12, 12))

    def loss(prompts: Tensor, keys: Tensor) -> Tensor:
        named = {"pool.prompts": prompts, "pool.keys": keys}
        with torch.nn.utils.stateless._reparametrize_module(network, named):
            features, cosines = network.prompted(x)
            return features.square().sum() + cosines.sum()

    given = (network.pool.prompts.detach().requires_grad_(), network.pool.keys.detach().requires_grad_())
    assert torch.autograd.gradcheck(loss, given, eps=1e-6, atol=1e-6)


def test_the_transformer_is_no_part_of_the_network() -> None:
    network = small()
    assert set(network.state_dict()) == {"pool.prompts", "pool.keys", "head.weight", "head.bias"}
    assert not list(network.buffers())
    assert num_parameters(network) == 5 * 3 * 8 + 5 * 8 + 8 * 4 + 4
    copied = copy.deepcopy(network)
    assert copied.backbone is network.backbone
    assert copied.pool.prompts is not network.pool.prompts
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        lent = networks_for_threads(network, 2)
    finally:
        torch.set_num_threads(threads)
    assert len(lent) == 2
    assert all(other.backbone is network.backbone for other in lent)  # type: ignore[union-attr]


def test_the_transformer_follows_its_network() -> None:
    network = torch.nn.Sequential(small())
    vit = network[0].backbone.vit
    assert network.double() is network
    assert {value.dtype for value in vit.state_dict().values()} == {torch.float64}
    network.to("meta")
    assert {value.device.type for value in vit.state_dict().values()} == {"meta"}


def test_sizes_with_the_defaults_are_those_of_the_base_transformer() -> None:
    with torch.device("meta"):
        network = PromptedViT((3, 32, 32), 100)
        reference = VisionTransformer(224, 16, 12, 12, 768, 3072)
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 100)
    assert num_parameters(network) == 46_080 + 76_900
    assert num_parameters(network.backbone.vit) == num_parameters(reference) - 769_000 == 85_798_656


def test_a_random_transformer_is_that_of_the_seed() -> None:
    one, same, other = (small(seed).backbone.vit.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.pos_embedding"], other["encoder.pos_embedding"])


def saved(path: Path, **sizes: int) -> VisionTransformer:
    torch.manual_seed(7)
    vit = VisionTransformer(**{**SIZES, **sizes}, num_classes=3)
    torch.nn.init.normal_(vit.class_token)  # torchvision's are zeros
    torch.save(vit.state_dict(), path)
    return vit.double().eval()


def test_weights_come_from_a_file_of_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = saved(tmp_path / "vit.pth")
    x = images()
    with torch.no_grad():
        expected = vit.heads(theirs(small(weights=str(tmp_path / "vit.pth")).double())(x))
        torch.testing.assert_close(expected, vit(x))
    monkeypatch.setenv("HOME", str(tmp_path))
    small(weights="~/vit.pth")


def test_weights_by_their_older_names(tmp_path: Path) -> None:
    """Files with the older names of an MLP's layers, as torchvision published them, load as well."""
    vit = saved(tmp_path / "vit.pth")
    older = {
        n.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v
        for n, v in vit.float().state_dict().items()
    }
    assert set(older) != set(vit.state_dict())
    torch.save(older, tmp_path / "older.pth")
    found, expected = (
        small(weights=str(tmp_path / name)).backbone.vit.state_dict() for name in ("older.pth", "vit.pth")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_are_not_there_or_do_not_fit(tmp_path: Path) -> None:
    saved(tmp_path / "deeper.pth", num_layers=3)
    saved(tmp_path / "larger.pth", image_size=16)
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    reasons = {
        "absent.pth": "no such file",
        "deeper.pth": "Unexpected key.*encoder_layer_2",
        "larger.pth": "size mismatch for encoder.pos_embedding",
        "text.pth": "text.pth",
        "list.pth": "list.pth",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            small(weights=str(tmp_path / name))
        assert caught.value.key == "model.network.weights"
        assert "vit_b_16-c867db91.pth" in str(caught.value)
        assert "IMAGENET1K_V1" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"top_k": 6}, "model.network.top_k"),
        ({"top_k": 0}, "model.network.top_k"),
        ({"pool_size": 0}, "model.network.pool_size"),
        ({"prompt_length": 0}, "model.network.prompt_length"),
        ({"num_layers": 0}, "model.network.num_layers"),
        ({"patch_size": 5}, "model.network.patch_size"),
        ({"num_heads": 3}, "model.network.num_heads"),
        ({"shape": (2, 12, 12)}, "model.network"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**options)
    assert caught.value.key == key
