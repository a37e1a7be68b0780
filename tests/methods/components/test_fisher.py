"""The diagonal Fisher information against a loop over samples, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.naive_fisher import mean_squared_gradients
from support.tiny import ConvNet, StridedNet
from torch import Tensor, nn
from torch.func import functional_call

import cfl.methods.components.curvature.layer_squares
import cfl.methods.components.curvature.sample_gradients
from cfl.methods.components.curvature.fisher import FisherKind, diagonal_fisher
from cfl.methods.components.curvature.layer_squares import Convolution
from cfl.methods.components.curvature.sample_gradients import squared_gradient_sums
from cfl.methods.components.mean_gradient import Labelled, mean_gradient
from cfl.metrics.measures.accuracy import ACCURACY
from cfl.metrics.measures.regression import REGRESSION
from cfl.models import MADE, MLP, LeNet
from cfl.models.batchnorm import convert_batchnorm
from cfl.randomness.generators import torch_generator
from cfl.testing.comparing import difference

SHAPE, OUTPUTS, SAMPLES = (2, 6, 6), 5, 7


class Grouped(nn.Module):
    """A network with groups, dilation, stride, padding, a linear layer over positions and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=(2, 1), dilation=(2, 1), groups=2)
        self.conv2 = nn.Conv2d(4, 6, (1, 3), stride=(2, 1), groups=1, bias=False)
        self.positions = nn.Linear(6, 3)
        self.plain = nn.Linear(3, 4, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        tokens = torch.tanh(self.positions(x.flatten(2).mT))
        logits: Tensor = self.head(self.relu(self.plain(tokens)).sum(1))
        return logits


class Shared(nn.Module):
    """A network with a layer called twice, a weight used outside its layer, a bare parameter and unknown layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, 2, 3, padding="same")
        self.mirrored = nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(1, 2)
        self.first = nn.Linear(72, 6)
        self.twice = nn.Linear(6, 6)
        self.borrowed = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.relu(self.norm(self.mirrored(self.inner(x)))).flatten(1)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = self.scale * (self.borrowed(x) + x @ self.borrowed.weight)
        logits: Tensor = self.head(x)
        return logits


class Norms(nn.Module):
    """BatchNorm over maps, units and sequences, one without scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.maps = nn.BatchNorm2d(3)
        self.sequence = nn.BatchNorm1d(3)
        self.fc = nn.Linear(48, 6)
        self.bare = nn.BatchNorm1d(6, affine=False)
        self.units = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sequence(torch.relu(self.maps(self.conv(x))).flatten(2))
        logits: Tensor = self.head(torch.relu(self.units(self.bare(self.fc(x.flatten(1))))))
        return logits


class Residual(nn.Module):
    """Two paths from one activation, one of them a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.path = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.head = nn.Linear(3 * 36, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        logits: Tensor = self.head((x + self.path(self.norm(x))).relu_().flatten(1))
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(SHAPE, OUTPUTS, hidden=[6, 5], dropout=0.5),
    "softmax regression": lambda: MLP(SHAPE, OUTPUTS, hidden=[]),
    "convolutions": lambda: StridedNet(SHAPE, OUTPUTS, dropout=0.5),
    "batchnorm": lambda: ConvNet(SHAPE, OUTPUTS, norm=True),
    "masked batchnorm": lambda: convert_batchnorm(Norms()),
    "plain batchnorm": Norms,
    "grouped": Grouped,
    "shared": Shared,
    "residual": Residual,
    "lenet": lambda: LeNet(SHAPE, OUTPUTS),
}


def made(name: str) -> nn.Module:
    """The network in float64, its running statistics and weights away from their initial values."""
    torch.manual_seed(3)
    network = NETWORKS[name]().double()
    for key, tensor in network.state_dict().items():
        if "running_var" in key:
            tensor.uniform_(0.5, 2.0)
        elif "running_mean" in key or ("norm" in key and tensor.is_floating_point()):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    return network


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(1, 4, (count,), generator=generator)  # labels that every mask below allows


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    assert any(float(value.abs().max()) > 1e-3 for value in expected.values())
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-13)


MASK = torch.tensor([False, True, True, True, False])


@pytest.mark.parametrize("outputs", [None, MASK], ids=["all outputs", "masked"])
@pytest.mark.parametrize("kind", ["empirical", "expected", "weighted"])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_mean_of_squared_gradients_over_samples(name: str, kind: FisherKind, outputs: Tensor | None) -> None:
    network = made(name)
    x, y = samples()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    found = diagonal_fisher(network, {}, batches, kind, outputs)
    assert_close(found, mean_squared_gradients(network, x, y, kind, outputs))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "shared"])
def test_layers_that_are_known_take_the_short_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("sample by sample")

    monkeypatch.setattr(cfl.methods.components.curvature.sample_gradients, "_add_sample_by_sample", refuse)
    x, y = samples()
    diagonal_fisher(made(name), {}, [(x, y)])


@pytest.mark.parametrize("options", [{"hidden": [7]}, {"hidden": [6, 5], "direct": True, "conditioning": True}])
def test_densities_take_the_short_way_and_are_the_mean_of_squared_gradients(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("sample by sample")

    monkeypatch.setattr(cfl.methods.components.curvature.sample_gradients, "_add_sample_by_sample", refuse)
    torch.manual_seed(3)
    network = MADE((1, 2, 3), 6, **options).double()
    x = torch.randint(0, 2, (SAMPLES, 1, 2, 3), generator=torch.Generator().manual_seed(4)).double()
    found = diagonal_fisher(network, {}, [(x, torch.zeros(SAMPLES, dtype=torch.int64))])
    expected = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    for one in x:
        gradients = torch.autograd.grad(network.log_likelihood(one[None]).sum(), list(network.parameters()))
        for (name, _), gradient in zip(network.named_parameters(), gradients, strict=True):
            expected[name] += gradient.square() / SAMPLES
    assert_close(found, expected)


def test_others_are_differentiated_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only parameters that are used twice or outside their layer, and layers without a formula of their own."""
    asked: list[str] = []
    whole = cfl.methods.components.curvature.sample_gradients._add_sample_by_sample

    def note(network: Any, tensors: Any, x: Any, v: Any, names: list[str], sums: Any) -> None:
        asked.extend(names)
        whole(network, tensors, x, v, names, sums)

    monkeypatch.setattr(cfl.methods.components.curvature.sample_gradients, "_add_sample_by_sample", note)
    x, y = samples()
    diagonal_fisher(made("shared"), {}, [(x, y)])
    assert {name.split(".")[0] for name in asked} == {"inner", "norm", "twice", "borrowed", "scale"}


@pytest.mark.parametrize(
    ("name", "limit"),
    [("grouped", "CHUNK"), ("shared", "CHUNK"), ("convolutions", "CHUNK"), ("convolutions", "CACHED")],
)
def test_chunks_change_nothing(name: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(name)
    x, y = samples()
    whole = diagonal_fisher(network, {}, [(x, y)])
    chunks, sizes = cfl.methods.components.curvature.layer_squares.chunks, []

    def counted(count: int, numbers: int, most: int | None = None) -> list[slice]:
        cut = list(chunks(count, numbers, most))
        sizes.append(len(cut))
        return cut

    for module in (cfl.methods.components.curvature.layer_squares, cfl.methods.components.curvature.sample_gradients):
        if hasattr(module, "chunks"):
            monkeypatch.setattr(module, "chunks", counted)
    assert_close(diagonal_fisher(network, {}, [(x, y)]), whole)
    assert set(sizes) == {1}
    sizes.clear()
    monkeypatch.setattr(cfl.methods.components.curvature.layer_squares, limit, 1)
    assert_close(diagonal_fisher(network, {}, [(x, y)]), whole)
    assert len(x) in sizes, "sample by sample"


@pytest.mark.parametrize("name", ["grouped", "convolutions", "batchnorm", "residual", "lenet"])
def test_memory_with_the_channels_last_changes_nothing(name: str) -> None:
    """Convolutions' outputs then have their channels last too, and patches are copied in another order."""
    network = made(name)
    x, y = samples()
    expected = diagonal_fisher(network, {}, [(x, y)])
    last = {n: channels_last(p.detach()) if p.ndim == 4 else p for n, p in network.named_parameters()}
    for images in (x, channels_last(x)):
        found = diagonal_fisher(network, last, [(images, y)])
        assert_close(found, expected)
        assert all(value.is_contiguous() for value in found.values())


def test_on_a_cpu_maps_have_their_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps with and without the channels last give the same Fisher."""
    network = made("convolutions")
    x, y = samples()
    orders: list[bool] = []
    layer = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    handle = layer.register_forward_hook(lambda module, inputs, output: orders.append(output.stride(1) == 1))
    found = diagonal_fisher(network, {}, [(x, y)])
    assert orders[-1]
    monkeypatch.setattr("cfl.methods.components.curvature.fisher.gains_by_channels_last", lambda *_: False)
    expected = diagonal_fisher(network, {}, [(x, y)])
    assert not orders[-1]
    handle.remove()
    assert_close(found, expected)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": (2, 3)}, {"padding": (2, 1)}, {"dilation": (1, 2)}, {"stride": 2, "padding": 3, "dilation": 2}],
    ids=str,
)
@pytest.mark.parametrize("groups", [1, 2])
def test_patches_are_those_of_unfold(groups: int, options: dict[str, Any], last: bool) -> None:
    module = nn.Conv2d(4, 6, (3, 2), groups=groups, **options)
    for a in (torch.randn(3, 4, 7, 8), channels_last(torch.randn(3, 4, 7, 8)), torch.randn(3, 4, 7, 9)[..., 1:]):
        geometry: Any = (module.kernel_size, module.dilation, module.padding, module.stride)
        of = Convolution(module.kernel_size, geometry[3], geometry[2], module.dilation, groups)
        expected = F.unfold(a, *geometry).unflatten(1, (groups, 4 // groups, 6))
        found = cfl.methods.components.curvature.layer_squares.unfolded(a, of, last)
        columns = found.mT.unflatten(2, (6, 4 // groups) if last else (4 // groups, 6))
        assert torch.equal(columns.transpose(2, 3) if last else columns, expected)


def test_a_mean_is_the_sum_over_samples_divided_by_how_many_they_are() -> None:
    network = made("mlp")
    x, y = samples()
    total = diagonal_fisher(network, {}, [(x, y)], reduction="sum")
    assert_close({n: value / SAMPLES for n, value in total.items()}, diagonal_fisher(network, {}, [(x, y)]))


def test_it_computes_with_the_tensors_it_is_given() -> None:
    network, other = made("masked batchnorm"), made("masked batchnorm")
    for tensor in other.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(1.3)
    x, y = samples()
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    found = diagonal_fisher(network, tensors, [(x, y)])
    assert_close(found, mean_squared_gradients(other, x, y))


def test_only_what_is_asked_for() -> None:
    network = made("shared")
    x, y = samples()
    names = ["scale", "twice.weight", "head.bias", "norm.bias"]
    whole = diagonal_fisher(network, {}, [(x, y)])
    assert_close(diagonal_fisher(network, {}, [(x, y)], names=names), {name: whole[name] for name in names})


@pytest.mark.parametrize("cut", [1, 4, SAMPLES])
def test_of_numbers_it_is_the_mean_squared_gradient_of_the_squared_error(cut: int) -> None:
    """However samples are cut into batches."""
    network = made("mlp")
    x, _ = samples()
    y = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(5))
    parts = list(zip(x.split(cut), y.split(cut), strict=True))
    expected = {name: torch.zeros_like(tensor) for name, tensor in network.named_parameters()}
    for image, numbers in zip(x, y, strict=True):
        loss = F.mse_loss(network.eval()(image[None])[0], numbers.double())
        for (name, tensor), gradient in zip(
            network.named_parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True
        ):
            assert gradient.shape == tensor.shape
            expected[name] += gradient.square() / SAMPLES
    assert_close(diagonal_fisher(network, {}, parts, measure=REGRESSION), expected)


# The model's own labels.


def test_drawn_labels_are_those_of_a_loop() -> None:
    """The Fisher is that of labels which a loop draws from the cumulated probabilities with the same numbers."""
    network = made("mlp")
    x, y = samples(40)
    found = diagonal_fisher(network, {}, [(x, y)], "sampled", MASK, generator=torch_generator(0, "draw"))
    assert_close(found, mean_squared_gradients(network, x, y, "sampled", MASK))


def test_drawn_labels_give_the_expectation_in_the_mean() -> None:
    """The head's bias over 200,000 draws: within five standard errors, and closer than the true labels are."""
    network = made("mlp")
    x, y = samples(4)
    many = x.repeat(50_000, 1, 1, 1), y.repeat(50_000)
    names = ["head.bias"]
    expected = diagonal_fisher(network, {}, [(x, y)], "expected", names=names)["head.bias"]
    sampled = diagonal_fisher(network, {}, [many], "sampled", names=names, generator=torch_generator(1, "draw"))
    error = (sampled["head.bias"] - expected).abs().max()
    assert float(error) < 5 * 0.5 / 200_000**0.5  # squares in [0, 1] have a standard deviation of at most a half
    empirical = diagonal_fisher(network, {}, [(x, y)], "empirical", names=names)["head.bias"]
    assert float((empirical - expected).abs().max()) > 20 * float(error)


def test_the_expected_one_is_the_gauss_newton_diagonal() -> None:
    """For softmax regression it is the diagonal of the exact Hessian of the mean cross-entropy."""
    network = made("softmax regression")
    x, y = samples()
    names = [n for n, _ in network.named_parameters()]

    def loss(*parameters: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, dict(zip(names, parameters, strict=True)), (x,)), y)

    hessian = torch.autograd.functional.hessian(loss, tuple(network.parameters()))
    found = diagonal_fisher(network, {}, [(x, y)], "expected")
    for row, (name, parameter) in enumerate(network.named_parameters()):
        size = parameter.numel()
        diagonal = hessian[row][row].reshape(size, size).diagonal().view_as(parameter)
        torch.testing.assert_close(found[name], diagonal.detach(), rtol=1e-9, atol=1e-13)


# BatchNorm by the batch's own statistics.


@pytest.mark.parametrize("name", ["masked batchnorm", "plain batchnorm", "batchnorm", "residual"])
def test_batch_statistics_are_constants(name: str) -> None:
    """The Fisher is that of a network whose running statistics are the batch's, layer by layer."""
    network, frozen = made(name), made(name)
    x, y = samples()
    norms = [m for m in frozen.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in norms:  # one after another: the first layers' statistics decide what the later ones see
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].detach()))
        frozen.eval()(x)
        handle.remove()
        axes = [0, *range(2, seen[0].ndim)]
        layer.running_mean.copy_(seen[0].mean(axes))
        layer.running_var.copy_(seen[0].var(axes, unbiased=False))
    before = {n: t.clone() for n, t in network.state_dict().items()}
    network.train()
    found = diagonal_fisher(network, {}, [(x, y)], batch_statistics=True)
    assert_close(found, mean_squared_gradients(frozen, x, y))
    assert all(module.training for module in network.modules())
    assert all(torch.equal(tensor, before[n]) for n, tensor in network.state_dict().items())


def test_layers_in_evaluation_mode_keep_their_statistics() -> None:
    network, (x, y) = made("batchnorm"), samples()
    expected = diagonal_fisher(network.eval(), {}, [(x, y)])
    assert_close(diagonal_fisher(network, {}, [(x, y)], batch_statistics=True), expected)
    assert difference(diagonal_fisher(network.train(), {}, [(x, y)], batch_statistics=True), expected) is not None


def test_layers_without_running_statistics_use_the_batchs() -> None:
    network, twin = ConvNet(SHAPE, OUTPUTS, norm=True).double(), ConvNet(SHAPE, OUTPUTS, norm=True).double()
    network.conv_norm = nn.BatchNorm2d(2, track_running_stats=False).double()
    network.fc_norm = nn.BatchNorm1d(5, track_running_stats=False).double()
    twin.load_state_dict(network.state_dict(), strict=False)
    x, y = samples()
    found = diagonal_fisher(convert_batchnorm(network), {}, [(x, y)])
    assert_close(found, diagonal_fisher(twin, {}, [(x, y)], batch_statistics=True))
    assert network.conv_norm.running_mean is None


# The sum underneath, and what is refused.


def test_signals_add_up() -> None:
    """Two signals, one of them doubled: squares add."""
    network = made("grouped")
    x, _ = samples()
    v, w = torch.randn(2, SAMPLES, OUTPUTS, dtype=torch.float64)
    names = [n for n, _ in network.named_parameters()]

    def sums(*signals: Tensor) -> dict[str, Tensor]:
        return squared_gradient_sums(network, {}, x, lambda _: signals, names)

    separate = {n: value + 4 * sums(w)[n] for n, value in sums(v).items()}
    assert_close(sums(v, 2 * w), separate)


def test_the_network_is_left_as_it_was() -> None:
    network = made("mlp").train()
    network.requires_grad_(False)
    x, y = samples()
    with torch.no_grad():
        diagonal_fisher(network, {}, [(x, y)])
    assert all(module.training for module in network.modules())
    assert not any(p.requires_grad or p.grad is not None for p in network.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_refusals() -> None:
    network = made("mlp")
    x, y = samples()
    with pytest.raises(ValueError, match="no samples"):
        diagonal_fisher(network, {}, [])
    with pytest.raises(ValueError, match="label 0 is not among"):
        diagonal_fisher(network, {}, [(x, torch.zeros_like(y))], outputs=MASK)
    with pytest.raises(ValueError, match="generator"):
        diagonal_fisher(network, {}, [(x, y)], "sampled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_over_many_batches(dtype: torch.dtype) -> None:
    """A sum in the weights' type would stop growing after some hundred samples."""
    network = MLP(SHAPE, OUTPUTS, hidden=[4], dropout=0.0).to(dtype)
    x, y = torch.randn(600, *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(600) % OUTPUTS
    batches = [(one[None], label[None]) for one, label in zip(x, y, strict=True)]
    tensors = dict(network.named_parameters())
    found = diagonal_fisher(network, tensors, batches, "empirical")
    exact = copy.deepcopy(network).double()
    expected = diagonal_fisher(exact, dict(exact.named_parameters()), [(x.double(), y)], "empirical")
    for name, values in expected.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name].double(), values, rtol=0.1, atol=0.02 * float(values.max()))
    labelled = [Labelled(a, b, None, {}) for a, b in batches]
    gradient = mean_gradient(network, tensors, labelled, ACCURACY)
    whole = [Labelled(x.double(), y, None, {})]
    for name, values in mean_gradient(exact, dict(exact.named_parameters()), whole, ACCURACY).items():
        torch.testing.assert_close(gradient[name].double(), values, rtol=0.1, atol=0.02 * float(values.abs().max()))
