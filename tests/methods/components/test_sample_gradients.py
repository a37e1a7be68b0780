"""Squared gradients of networks of a user's own against one backward pass per sample, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.naive_fisher import mean_squared_gradients
from support.tiny import mlp
from torch import Tensor, nn

import cfl.methods.components.curvature.sample_gradients
from cfl.methods.components.curvature.fisher import FISHER_KINDS, FisherKind, check_fisher, diagonal_fisher
from cfl.metrics.measure import ACCURACY
from cfl.models.batchnorm import convert_batchnorm
from cfl.randomness.generators import torch_generator
from cfl.runtime.errors import ConfigError

SHAPE, OUTPUTS, POSITIONS, WIDTH = (2, 6, 5), 4, 6, 8  # an image is a sequence of its six rows of ten numbers


class Net(nn.Module):
    """Rows of an image through a layer, what subclasses do with them, and the mean over rows through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(10, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self.rows(x.permute(0, 2, 1, 3).flatten(2))).mean(1))
        return logits

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h))


class Encoder(Net):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first)

    def between(self, h: Tensor) -> Tensor:
        return self.inner(h) if self.inner.self_attn.batch_first else self.inner(h.transpose(0, 1)).transpose(0, 1)


class SequenceFirst(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h.transpose(0, 1))).transpose(0, 1)


class Folded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(h.flatten(0, 1)))).view(h.shape)


class FoldedMaps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 1, 3, padding=1)
        self.norm = nn.BatchNorm2d(1)

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(self.norm(self.inner(h.view(-1, 1, 4, 2)))).view(h.shape)


class Recurrent(Net):
    def __init__(self, kind: Callable[..., nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, batch_first=batch_first)
        self.batch_first = batch_first

    def between(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.inner(h))
        found: Tensor = self.recurrent(h if self.batch_first else h.transpose(0, 1))[0]
        return found if self.batch_first else found.transpose(0, 1)


class Branching(Net):
    """Takes another way for samples with a positive mean, one sample at a time."""

    def between(self, h: Tensor) -> Tensor:
        h = super().between(h)
        return h.square() if h.mean() > 0 else h


class Routed(Net):
    """Sends those positions through a layer whose first number is positive."""

    def between(self, h: Tensor) -> Tensor:
        chosen = h[..., 0] > 0
        return h.masked_scatter(chosen[..., None], torch.tanh(self.inner(h[chosen])))


class Masked(Net):
    """Multiplies a weight with a constant first."""

    def between(self, h: Tensor) -> Tensor:
        mask = torch.arange(WIDTH**2, dtype=h.dtype).view(WIDTH, WIDTH) % 3
        return torch.tanh(F.linear(h, self.inner.weight * mask, self.inner.bias))


class TwiceMasked(Net):
    def between(self, h: Tensor) -> Tensor:
        weight = self.inner.weight * 2
        return torch.tanh(F.linear(h, weight, self.inner.bias) + F.linear(h, weight))


class ByKeyword(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(input=h))


def hooked(before: Any = None, after: Any = None) -> Net:
    network = Net()
    if before is not None:
        network.inner.register_forward_pre_hook(before)
    if after is not None:
        network.inner.register_forward_hook(after)
    return network


def replaced(forward: Callable[[nn.Linear, Tensor], Tensor]) -> Net:
    network = Net()
    network.inner.forward = partial(forward, network.inner)  # type: ignore[method-assign]
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "transformer, sequence first": lambda: Encoder(False),
    "transformer": lambda: Encoder(True),
    "sequence first": SequenceFirst,
    "folded": Folded,
    "folded, masked norms": lambda: convert_batchnorm(Folded()),
    "folded maps": FoldedMaps,
    "gru": lambda: Recurrent(nn.GRU, True),
    "lstm, sequence first": lambda: Recurrent(nn.LSTM, False),
    "branching": Branching,
    "routed": Routed,
    "masked": Masked,
    "twice masked": TwiceMasked,
    "by keyword": ByKeyword,
    "input scaled by a hook": lambda: hooked(before=lambda module, inputs: (3 * inputs[0],)),
    "output squared by a hook": lambda: hooked(after=lambda module, inputs, output: output.square()),
    "weight in a hook": lambda: hooked(after=lambda module, inputs, output: output + module.weight.sum()),
    "forward with more": lambda: replaced(lambda layer, x: F.linear(x, layer.weight, layer.bias).square()),
    "forward of another kind": lambda: replaced(lambda layer, x: x @ layer.weight.square() + layer.bias),
    "weight norm": lambda: with_inner(nn.utils.parametrizations.weight_norm),
}


def with_inner(change: Callable[[nn.Module], nn.Module]) -> Net:
    network = Net()
    network.inner = change(network.inner)  # type: ignore[assignment]
    return network


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    network = NETWORKS[name]().double()
    for key, tensor in network.named_buffers():
        if "running" in key:
            tensor.uniform_(0.5, 2.0)
    return network


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(OUTPUTS, (count,), generator=generator)


assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-13)


@pytest.mark.filterwarnings("ignore:the Fisher information of")
@pytest.mark.parametrize("count", [POSITIONS, 7, 2, 1], ids=["as many as positions", "more", "two", "one"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_mean_of_squared_gradients_over_samples(name: str, count: int) -> None:
    x, y = samples(count)
    assert_same(diagonal_fisher(made(name), {}, [(x, y)]), mean_squared_gradients(made(name), x, y))


@pytest.mark.parametrize("kind", FISHER_KINDS)
@pytest.mark.parametrize("name", ["transformer, sequence first", "sequence first", "folded"])
def test_labels_of_every_kind(name: str, kind: FisherKind) -> None:
    x, y = samples(POSITIONS)
    found = diagonal_fisher(made(name), {}, [(x, y)], kind, generator=torch_generator(0, "draw"))
    assert_same(found, mean_squared_gradients(made(name), x, y, kind))


@pytest.mark.parametrize("sizes", [(POSITIONS, 2, 1), (1, POSITIONS), (2, 3, POSITIONS), (7, POSITIONS)], ids=str)
def test_batches_of_many_sizes(sizes: tuple[int, ...]) -> None:
    """What one batch has shown about a layer holds for those after it, among them one with a sample per position."""
    x, y = samples(sum(sizes))
    network = made("sequence first")
    assert_same(
        diagonal_fisher(network, {}, zip(x.split(sizes), y.split(sizes), strict=True)),
        mean_squared_gradients(network, x, y),
    )


def test_two_positions_in_batches_of_two() -> None:
    """The other batch that a first one is compared with has two samples."""
    network, (x, y) = made("sequence first"), samples(7)
    x = x[:, :, :2]
    expected = mean_squared_gradients(network, x, y)
    assert_same(diagonal_fisher(network, {}, [(x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:], y[5:])]), expected)


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("plain", set()),
        ("masked", set()),
        ("input scaled by a hook", set()),
        ("output squared by a hook", set()),
        ("forward with more", set()),
        ("folded", {"inner.weight", "inner.bias", "norm.weight", "norm.bias"}),
        ("sequence first", {"inner.weight", "inner.bias"}),
        ("forward of another kind", {"inner.weight", "inner.bias"}),
        ("weight in a hook", {"inner.weight"}),
    ],
)
def test_only_what_has_no_row_per_sample_takes_the_long_way(
    name: str, slow: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    whole = cfl.methods.components.curvature.sample_gradients._add_sample_by_sample

    def note(network: Any, tensors: Any, x: Any, v: Any, names: list[str], sums: Any) -> None:
        asked.update(names)
        whole(network, tensors, x, v, names, sums)

    monkeypatch.setattr(cfl.methods.components.curvature.sample_gradients, "_add_sample_by_sample", note)
    diagonal_fisher(made(name), {}, [samples(POSITIONS)])
    assert asked == slow


def test_convolutions_whose_maps_are_reshaped() -> None:
    """With channels last in memory the view would fail, which two samples tell."""

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.Conv2d(1, 3, 3)
            self.head = nn.Linear(36, OUTPUTS)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.relu(self.maps(x.flatten(0, 1).unsqueeze(1))).view(len(x), 2, -1).sum(1))
            return logits

    torch.manual_seed(3)
    network, (x, y) = Maps().double(), samples(5)
    assert_same(diagonal_fisher(network, {}, [(x, y)]), mean_squared_gradients(network, x, y))


@pytest.mark.filterwarnings("ignore:the Fisher information of")
def test_recurrent_layers_are_differentiated_without_cudnn() -> None:
    """CuDNN's have no gradients in evaluation mode."""
    network, enabled = made("gru"), []
    network.recurrent.register_forward_hook(lambda *_: enabled.append(torch.backends.cudnn.enabled))
    before = torch.backends.cudnn.enabled
    diagonal_fisher(network, {}, [samples(3)])
    assert set(enabled) == {False}
    assert torch.backends.cudnn.enabled == before


# What is said before training.


def check(network: nn.Module) -> None:
    names = [name for name, _ in network.named_parameters()]
    check_fisher("empirical", network, "methods.ewc.fisher", ACCURACY, SHAPE, names)


@pytest.mark.parametrize("name", ["gru", "branching"])
def test_one_backward_pass_per_sample_is_told(name: str) -> None:
    with pytest.warns(UserWarning, match="one backward pass per sample"):
        check(made(name))


@pytest.mark.parametrize("name", ["plain", "transformer, sequence first", "folded", "weight norm"])
def test_nothing_is_told_of_networks_that_vmap_can_compute(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the Fisher information of")
        check(made(name))


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x).detach()


class Checkpointed(Net):
    def between(self, h: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.inner, h, use_reentrant=True)
        return found


class Failing(Net):
    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            raise KeyError("absent")
        return h


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Detached, "Detached: outputs without gradients"),
        (Checkpointed, "Checkpointed: RuntimeError: When use_reentrant=True"),
        (Failing, "Failing: KeyError: 'absent'"),
        (lambda: with_inner(nn.utils.weight_norm), "Net: RuntimeError: Only Tensors created explicitly"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_network_that_cannot_be_differentiated_is_refused(network: Callable[[], Net], said: str) -> None:
    with pytest.raises(
        ConfigError, match=r"valid: .* differentiated in evaluation mode, for methods\.ewc\.fisher"
    ) as e:
        check(network())
    assert e.value.key == "model.network"
    assert str(e.value.value).startswith(said)


class Counting(Net):
    """Counts in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.seen.add_(h.detach().abs().sum())
        return super().between(h)


def test_buffers_are_not_changed() -> None:
    network = Counting()
    check(network)
    diagonal_fisher(network, {}, [(x.float(), y) for x, y in [samples(3)]])
    assert float(network.seen) == 0


def test_a_trial_leaves_nothing_behind() -> None:
    network = mlp((1, 4, 4), 3).train()
    network.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    names = [name for name, _ in network.named_parameters()]
    check_fisher("empirical", network, "methods.ewc.fisher", ACCURACY, (1, 4, 4), names)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
