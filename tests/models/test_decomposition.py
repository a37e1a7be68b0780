"""Decomposed weights are the sum of the equation, in values and gradients, alone and stacked."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny import ConvNet, NetworkFactory, StridedNet, deep_mlp, double, mlp
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cfl.engines.chain import Chain
from cfl.models import LeNet, Network
from cfl.models.decomposition import decompose, decomposed_layers, is_base
from cfl.runtime.errors import ConfigError

SHAPE = (1, 6, 6)
NETWORKS: list[NetworkFactory] = [mlp, ConvNet, StridedNet]


def plain_and_decomposed(make: NetworkFactory, **parts: bool) -> tuple[Network, Network]:
    """The same network twice in float64, plain and with decomposed weights."""
    plain = double(make)(SHAPE, 4)
    network = copy.deepcopy(plain)
    decompose(network, **parts)
    return plain, network


@torch.no_grad()
def scatter(network: nn.Module, entries: int, seed: int = 0) -> None:
    """Set every part to random values, with a knowledge base of ``entries`` entries, the last of which is not used."""
    generator = torch.Generator().manual_seed(seed)
    for layer in decomposed_layers(network):
        parts = layer.parts
        parts.reserve(entries)
        for part in (parts.mask, parts.adaptive, parts.attention):
            if part is not None:
                part.copy_(torch.randn(part.shape, generator=generator, dtype=part.dtype))
        if parts.others is not None:
            parts.others[:-1] = 1
            shape = (entries, *layer.weight.shape)
            parts.knowledge.entries = torch.randn(shape, generator=generator, dtype=torch.float64)


def equation(network: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``B sigmoid(m) + A + sum_j alpha_j K_j`` of every layer, by units, without the last entry (see ``scatter``)."""
    weights = {}
    for layer in decomposed_layers(network):
        base = tensors[layer.base]
        rows = []
        for unit in range(len(base)):
            row = base[unit] * (1 / (1 + torch.exp(-tensors[layer.mask][unit]))) + tensors[layer.adaptive][unit]
            entries = layer.parts.knowledge.entries
            if entries is not None:
                for j in range(len(entries) - 1):
                    row = row + tensors[layer.attention][j] * entries[j, unit]
            rows.append(row)
        weights[f"{layer.name}.weight"] = torch.stack(rows)
    return weights


@pytest.mark.parametrize("make", [*NETWORKS, LeNet])
def test_open_masks_and_nothing_added_are_the_network_itself(make: NetworkFactory) -> None:
    plain, network = plain_and_decomposed(make, attends=True)
    x = torch.randn(3, *SHAPE)
    scatter(network, 3)
    assert not torch.allclose(network(x), plain(x))
    with torch.no_grad():
        for layer in decomposed_layers(network):
            assert layer.parts.mask is not None
            assert layer.parts.adaptive is not None
            assert layer.parts.attention is not None
            layer.parts.mask.fill_(50)
            layer.parts.adaptive.zero_()
            layer.parts.attention.zero_()
    torch.testing.assert_close(network(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("entries", [0, 3])
def test_values_and_gradients_are_those_of_the_equation(make: NetworkFactory, entries: int) -> None:
    plain, network = plain_and_decomposed(make, attends=entries > 0)
    if entries:
        scatter(network, entries)
    x, y = torch.randn(5, *SHAPE), torch.tensor([0, 1, 2, 3, 0])
    tensors = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    others = {n: t for n, t in tensors.items() if ".parametrizations." not in n}
    expected = functional_call(plain, {**others, **equation(network, tensors)}, (x,))
    expected_gradients = torch.autograd.grad(nn.functional.cross_entropy(expected, y), list(tensors.values()))
    found = network(x)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(found, y), list(network.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for name, one, other in zip(tensors, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert bool(one.any()), f"{name} has no part in the loss"


def test_an_entry_not_to_be_used_has_neither_effect_nor_gradient() -> None:
    _, network = plain_and_decomposed(ConvNet, attends=True)
    scatter(network, 3)
    x = torch.randn(4, *SHAPE)
    before = network(x)
    before.sum().backward()
    for layer in decomposed_layers(network):
        assert layer.parts.attention is not None
        assert layer.parts.attention.grad is not None
        assert layer.parts.attention.grad[2] == 0
        assert bool((layer.parts.attention.grad[:2] != 0).all())
        with torch.no_grad():
            layer.parts.attention[2] = 100
    assert torch.equal(network(x), before)


@pytest.mark.parametrize("make", NETWORKS)
def test_stacked_clients_are_the_single_ones(make: NetworkFactory) -> None:
    """Under vmap, each client has its own parts and usable entries. The knowledge base is shared."""
    _, network = plain_and_decomposed(make, attends=True)
    scatter(network, 3)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(4, *t.shape, generator=generator, dtype=torch.float64)
        for name, t in (*network.named_parameters(), *network.named_buffers())
    }
    x = torch.randn(4, 2, *SHAPE)
    together = vmap(lambda own, x: functional_call(network, own, (x,)))(tensors, x)
    for row in range(4):
        alone = functional_call(network, {name: t[row] for name, t in tensors.items()}, (x[row],))
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-12)


def test_names() -> None:
    plain, network = plain_and_decomposed(ConvNet, attends=True, remembers=True)
    before = dict(plain.named_parameters())
    after = dict(network.named_parameters())
    layers = decomposed_layers(network)
    assert [layer.name for layer in layers] == ["conv", "fc"]
    for layer in layers:
        assert torch.equal(after[layer.base], before[f"{layer.name}.weight"])
        assert torch.equal(after[layer.base], layer.weight)
        assert torch.equal(after[layer.adaptive], before[f"{layer.name}.weight"] / 3)
        assert layer.bias in before
        assert after[layer.mask].shape == after[layer.base].shape[:1]
    parts = {n for x in layers for n in (x.base, x.mask, x.adaptive, x.attention, x.earlier)}
    assert set(after) == parts | {n for n in before if n not in ("conv.weight", "fc.weight")}
    assert {n for n in after if is_base(n)} == {layer.base for layer in layers}
    assert set(dict(network.named_buffers())) == {layer.others for layer in layers}
    assert isinstance(network.head, nn.Linear)
    assert torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"masked": False}, {"adaptive"}),
        ({"adaptive": False}, {"mask"}),
        ({"attends": True}, {"mask", "adaptive", "attention"}),
        ({"remembers": True}, {"mask", "adaptive", "earlier"}),
    ],
    ids=["no mask", "no adaptive weights", "attention", "earlier tasks"],  # str(set) differs between processes
)
def test_parts_that_nobody_asked_for_are_not_there(parts: dict[str, bool], expected: set[str]) -> None:
    _, network = plain_and_decomposed(mlp, **parts)
    own = {n.rpartition(".")[2] for n, _ in network.named_parameters() if "parametrizations.weight.0" in n}
    assert own == expected
    base = decomposed_layers(network)[0].weight
    weight = network.get_submodule("layers.0").weight
    gate = 0.5 if parts.get("masked", True) else 1.0  # a logit of 0
    share = 1 / 3 if parts.get("adaptive", True) else 0.0
    torch.testing.assert_close(weight, base * (gate + share), rtol=0, atol=1e-12)


def test_the_knowledge_base_is_shared_by_copies_and_no_part_of_the_state() -> None:
    """Copies, which threads keep, share the knowledge base. It is no buffer: each client would copy a buffer."""
    _, network = plain_and_decomposed(mlp, attends=True)
    scatter(network, 3)
    other = copy.deepcopy(network)
    (layer,), (copied,) = decomposed_layers(network), decomposed_layers(other)
    assert copied.parts is not layer.parts
    x = torch.randn(2, *SHAPE)
    assert layer.parts.knowledge.entries is not None
    layer.parts.knowledge.entries = 2 * layer.parts.knowledge.entries
    assert torch.equal(other(x), network(x))
    held = {id(t) for t in (*network.parameters(), *network.buffers(), *network.state_dict().values())}
    assert id(layer.parts.knowledge.entries) not in held
    network.to("meta")
    assert layer.parts.knowledge.entries.device.type == "meta"


@pytest.mark.parametrize("make", [mlp, StridedNet])
def test_a_hand_written_step_does_not_take_it_for_a_plain_layer(make: NetworkFactory) -> None:
    network = make(SHAPE, 4)
    assert Chain.of(network) is not None
    decompose(network)
    assert Chain.of(network) is None


def test_decomposing_twice_is_refused() -> None:
    _, network = plain_and_decomposed(mlp)
    with pytest.raises(ValueError, match="already"):
        decompose(network)


def test_room_is_made_once() -> None:
    _, network = plain_and_decomposed(mlp, attends=True, remembers=True)
    (layer,) = decomposed_layers(network)
    network.requires_grad_(False)
    layer.parts.reserve(5, 2)
    attention, earlier = layer.parts.attention, layer.parts.earlier
    assert attention is not None
    assert earlier is not None
    assert (attention.shape, earlier.shape) == ((5,), (2, 8, 36))
    assert not attention.requires_grad
    assert not earlier.requires_grad
    assert attention.dtype == earlier.dtype == torch.float64
    layer.parts.reserve(5, 2)
    assert layer.parts.attention is attention
    assert layer.parts.earlier is earlier


def test_weights_made_of_others_and_shared_weights_are_refused() -> None:
    """Neither has a base of its own that could be sent and held."""
    made = mlp(SHAPE, 4)
    name, layer = next((n, m) for n, m in made.named_modules() if isinstance(m, nn.Linear))
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ConfigError, match=f"{name}, whose weight is made of others"):
        decompose(made)
    shared = deep_mlp(SHAPE, 4)
    shared.features_first, shared.again = nn.Linear(3, 3), nn.Linear(3, 3)
    shared.again.weight = shared.features_first.weight
    with pytest.raises(ConfigError, match="features_first and again, which share a weight"):
        decompose(shared)
