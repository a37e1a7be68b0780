import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import cfl
from cfl.models import (
    MaskedBatchNorm1d,
    MaskedBatchNorm2d,
    ResNet18,
    batch_mask,
    convert_batchnorm,
    unmaskable_layers,
)

assert cfl.__version__
EXACT = {"rtol": 1e-10, "atol": 1e-10}

# (masked class, torch's class, shape of one sample)
LAYERS = [
    (MaskedBatchNorm1d, nn.BatchNorm1d, (3,)),
    (MaskedBatchNorm1d, nn.BatchNorm1d, (3, 5)),
    (MaskedBatchNorm2d, nn.BatchNorm2d, (3, 4, 2)),
]
JUNK = [0.0, 1e6, float("nan"), float("inf")]
# A mask for each step: padding at the end, in between, or none.
MASKS = [[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 1]]


def pair(masked: type, torchs: type, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A masked layer and torch's, in float64, with the same non-trivial weights."""
    torch.manual_seed(0)
    ours, theirs = masked(3, **options).double(), torchs(3, **options).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.uniform_(-2, 2)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), **EXACT)


@pytest.mark.parametrize(("masked", "torchs", "sample"), LAYERS)
@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.1}, {"track_running_stats": False}, {"affine": False}],
    ids=str,
)
def test_padding_leaves_no_trace(
    masked: type, torchs: type, sample: tuple[int, ...], junk: float, options: dict[str, Any]
) -> None:
    ours, theirs = pair(masked, torchs, **options)
    for step, real in enumerate(MASKS):
        mask = torch.tensor(real, dtype=torch.bool)
        # Values far from zero: a formula that loses digits to cancellation would show.
        x = 5 + torch.randn(len(mask), *sample, dtype=torch.float64)
        weight = torch.randn_like(x)[mask]
        padded = x.clone()
        padded[~mask] = junk
        padded.requires_grad_()
        unpadded = x[mask].requires_grad_()

        with batch_mask(ours, mask):
            output = ours(padded)
        expected = theirs(unpadded)
        torch.testing.assert_close(output[mask], expected, **EXACT)
        assert output.isfinite().all()
        ours.zero_grad()
        theirs.zero_grad()
        (output[mask] * weight).sum().backward()
        (expected * weight).sum().backward()
        assert padded.grad is not None
        torch.testing.assert_close(padded.grad[mask], unpadded.grad, **EXACT)
        assert torch.equal(padded.grad[~mask], torch.zeros_like(padded.grad[~mask]))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, **EXACT)
        assert_same_state(ours, theirs)
        if options.get("track_running_stats", True):
            assert int(ours.num_batches_tracked) == step + 1


def test_a_weight_without_a_bias() -> None:
    ours, theirs = pair(MaskedBatchNorm1d, nn.BatchNorm1d)
    for layer in (ours, theirs):
        layer.register_parameter("bias", None)
    x = torch.randn(6, 3, dtype=torch.float64)
    with batch_mask(ours, torch.arange(6) < 4):
        output = ours(x)
    torch.testing.assert_close(output[:4], theirs(x[:4]), **EXACT)
    assert torch.equal(output[4:], torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("track", [True, False])
def test_evaluation(track: bool) -> None:
    ours, theirs = pair(MaskedBatchNorm2d, nn.BatchNorm2d, track_running_stats=track)
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64) * 2 + 1
    for layer in (ours, theirs):
        layer(x)
        layer.eval()
    mask = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    with batch_mask(ours, mask):
        output = ours(x)
    # With running statistics an output depends on its sample only. Without, it depends on the batch without padding.
    torch.testing.assert_close(output[mask], theirs(x[mask]), **EXACT)
    assert_same_state(ours, theirs)
    if not track:
        assert not torch.allclose(output[mask], theirs(x)[mask])


@pytest.mark.parametrize(("masked", "torchs", "sample"), LAYERS)
def test_without_a_mask_it_is_the_ordinary_layer(masked: type, torchs: type, sample: tuple[int, ...]) -> None:
    ours, theirs = pair(masked, torchs)
    x = torch.randn(4, *sample, dtype=torch.float64)
    with batch_mask(ours, None):
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x + 1), theirs(x + 1))
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    with pytest.raises(ValueError, match="expected"):
        ours(torch.zeros(2, 3, 1, 1, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected"), batch_mask(ours, torch.ones(2, dtype=torch.bool)):
        ours(torch.zeros(2, 3, 1, 1, 1, dtype=torch.float64))


@pytest.mark.parametrize(("masked", "sample"), [(row[0], row[2]) for row in LAYERS])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_of_padding_only_changes_nothing(masked: type, sample: tuple[int, ...], momentum: float | None) -> None:
    ours, _ = pair(masked, nn.BatchNorm1d if masked is MaskedBatchNorm1d else nn.BatchNorm2d, momentum=momentum)
    ours(torch.randn(4, *sample, dtype=torch.float64))
    before = copy.deepcopy(ours.state_dict())
    x = torch.full((4, *sample), float("nan"), dtype=torch.float64, requires_grad=True)
    with batch_mask(ours, torch.zeros(4, dtype=torch.bool)):
        output = ours(x)
    (output * torch.randn_like(output) * 0).sum().backward()  # a loss that counts no row
    assert torch.equal(output, ours.bias.view(1, 3, *[1] * (x.ndim - 2)).expand_as(output))
    for gradient in (x.grad, ours.weight.grad, ours.bias.grad):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    for name, value in before.items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_one_value_per_channel_has_no_variance() -> None:
    ours, _ = pair(MaskedBatchNorm1d, nn.BatchNorm1d)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    before = copy.deepcopy(ours.state_dict())
    with batch_mask(ours, torch.tensor([False, True, False])):
        output = ours(x)
    assert torch.equal(output, ours.bias.expand(3, 3))
    (output * torch.randn_like(output)).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    # A single sample without a mask gives the same output, not an error.
    assert torch.equal(ours(x[1:2]), output[1:2])
    for name, value in before.items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_half_precision_keeps_type_and_sums_in_float32() -> None:
    torch.manual_seed(0)
    layer = MaskedBatchNorm2d(2)
    x = (10 + torch.randn(64, 2, 8, 8)).bfloat16()
    mask = torch.arange(64) % 3 > 0
    with batch_mask(layer, mask):
        output = layer(x)
    expected = nn.BatchNorm2d(2)
    reference = expected(x[mask].float())
    assert output.dtype == torch.bfloat16
    assert torch.equal(output[mask], reference.bfloat16())
    torch.testing.assert_close(layer.running_var, expected.running_var)


@pytest.mark.parametrize("mask", [torch.ones(4), torch.ones(4, 1, dtype=torch.bool), torch.tensor(True)])
def test_bad_masks_are_refused(mask: Tensor) -> None:
    layer = MaskedBatchNorm1d(3)
    with pytest.raises(ValueError, match=r"bool \[B\]"), batch_mask(layer, mask):
        layer(torch.zeros(4, 3))


def test_a_mask_of_another_length_is_refused_and_forgotten_afterwards() -> None:
    layer = MaskedBatchNorm1d(3)
    with pytest.raises(ValueError, match="5 samples does not fit a batch of 4"), batch_mask(layer, torch.ones(5) > 0):
        layer(torch.zeros(4, 3))
    reference = nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), reference(x))


def test_nested_masks_and_networks() -> None:
    a, b = nn.Sequential(MaskedBatchNorm1d(3)), nn.Sequential(MaskedBatchNorm1d(3))
    x = torch.randn(4, 3)
    outer, inner = torch.tensor([True, True, True, False]), torch.tensor([True, True, False, False])
    with batch_mask(a, outer):
        first = a(x)
        with batch_mask(a, inner):
            second = a(x)
        third = a(x)
        untouched = b(x)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert torch.equal(untouched, nn.BatchNorm1d(3)(x))


class _Net(nn.Module):
    """A network with both kinds of layer, and torch's own BatchNorm until it is converted."""

    def __init__(self, momentum: float | None, track: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=momentum, track_running_stats=track)
        self.fc = nn.Linear(4 * 9, 6)
        self.norm_fc = nn.BatchNorm1d(6, momentum=momentum, track_running_stats=track)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.norm_fc(self.fc(x.flatten(1)))))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("track", [True, False])
def test_clients_side_by_side_train_as_if_alone(momentum: float | None, track: bool) -> None:
    """Stacked, padded, masked training equals one ordinary network per client on its own unpadded batches."""
    torch.manual_seed(0)
    alone = [_Net(momentum, track).double() for _ in range(3)]
    network = convert_batchnorm(copy.deepcopy(alone[0]))
    parameters, buffers = stack_module_state([convert_batchnorm(copy.deepcopy(net)) for net in alone])
    stacked_optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in alone]
    # Three steps: batches of different sizes, and the last client runs out of data.
    for sizes in ([6, 3, 4], [2, 6, 5], [6, 4, 0]):
        x = torch.randn(3, 6, 1, 5, 5, dtype=torch.float64)
        y = torch.randint(3, (3, 6))
        mask = torch.arange(6) < torch.tensor(sizes)[:, None]
        x[~mask] = 77.0

        def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            with batch_mask(network, mask):
                logits = functional_call(network, (p, b), (x,))
            each = nn.functional.cross_entropy(logits, y, reduction="none")
            return torch.where(mask, each, 0).sum() / mask.sum().clamp(min=1)

        stacked_optimizer.zero_grad()
        losses = vmap(loss)(parameters, buffers, x, y, mask)
        losses.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters.values())
        if 0 not in sizes:
            stacked_optimizer.step()
        for client, size in enumerate(sizes):
            if size:
                own = nn.functional.cross_entropy(alone[client](x[client, :size]), y[client, :size])
                torch.testing.assert_close(losses[client], own, **EXACT)
                optimizers[client].zero_grad()
                own.backward()
                for name, parameter in parameters.items():
                    expected = alone[client].get_parameter(name).grad
                    torch.testing.assert_close(parameter.grad[client], expected, **EXACT)
                if 0 not in sizes:
                    optimizers[client].step()
            else:
                assert all(not p.grad[client].any() for p in parameters.values())
    for name, stacked in (*parameters.items(), *buffers.items()):
        expected = torch.stack([net.state_dict()[name] for net in alone])
        torch.testing.assert_close(stacked.detach(), expected, **EXACT)
    assert len(buffers) == (6 if track else 0)
    if track:
        assert buffers["norm.num_batches_tracked"].tolist() == [3, 3, 2]


@pytest.mark.parametrize("norm", ["batch", "batch_no_stats"])
def test_a_resnet_on_a_padded_batch(norm: Any) -> None:
    torch.manual_seed(0)
    padded_net = ResNet18((3, 12, 12), 5, width=4, norm=norm, pool=1).double()
    plain_net = copy.deepcopy(padded_net)
    mask = torch.tensor([True, False, True, True, False])
    x = torch.randn(5, 3, 12, 12, dtype=torch.float64)
    with batch_mask(padded_net, mask):
        output = padded_net(x)
    expected = plain_net(x[mask])
    torch.testing.assert_close(output[mask], expected, **EXACT)
    output[mask].square().sum().backward()
    expected.square().sum().backward()
    for (name, a), b in zip(padded_net.named_parameters(), plain_net.parameters(), strict=True):
        scale = max(1.0, float(b.grad.abs().max()))
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10 * scale, msg=name)
    assert_same_state(padded_net, plain_net)


def test_convert_keeps_everything_but_the_class() -> None:
    shared = nn.BatchNorm1d(4, eps=0.01, momentum=0.3)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.Linear(36, 4), shared)
    network.append(nn.Linear(4, 4)).append(shared).append(nn.Dropout(0.0))
    network(torch.randn(8, 1, 5, 5))
    shared.weight.requires_grad_(False)
    network[1].eval()
    calls: list[nn.Module] = []
    shared.register_forward_hook(lambda module, *_: calls.append(module))
    original = copy.deepcopy(network)
    parameters, names = list(network.parameters()), list(network.state_dict())

    assert convert_batchnorm(network) is network
    assert [type(network[i]) for i in (1, 4, 6)] == [MaskedBatchNorm2d, MaskedBatchNorm1d, MaskedBatchNorm1d]
    assert network[4] is network[6]
    assert [id(p) for p in network.parameters()] == [id(p) for p in parameters]
    assert list(network.state_dict()) == names
    assert (network[4].eps, network[4].momentum, network[4].weight.requires_grad) == (0.01, 0.3, False)
    assert [module.training for module in network.modules()] == [module.training for module in original.modules()]
    x = torch.randn(8, 1, 5, 5)
    output = network(x)
    assert calls == [shared, shared]
    assert torch.equal(output, original(x))
    mask = torch.arange(8) < 5
    with batch_mask(network, mask):
        output = network(x)
    torch.testing.assert_close(output[mask], original(x[mask]))
    assert type(convert_batchnorm(nn.BatchNorm2d(3))) is MaskedBatchNorm2d


def test_layers_that_cannot_be_masked_are_listed() -> None:
    class Own(nn.BatchNorm2d):
        pass

    network = nn.ModuleDict(
        {
            "plain": nn.BatchNorm2d(3),
            "sync": nn.SyncBatchNorm(3),
            "volume": nn.BatchNorm3d(3),
            "lazy": nn.LazyBatchNorm2d(),
            "inner": nn.Sequential(nn.ReLU(), Own(3)),
            "instance": nn.InstanceNorm2d(3, affine=True),
            "averaging_instance": nn.InstanceNorm2d(3, track_running_stats=True),
            "group": nn.GroupNorm(1, 3),
            "layer": nn.LayerNorm(3),
            "masked": MaskedBatchNorm1d(3),
        }
    )
    stuck = ["sync", "volume", "lazy", "inner.1", "averaging_instance"]
    assert sorted(unmaskable_layers(network)) == sorted(["plain", *stuck])
    assert sorted(unmaskable_layers(convert_batchnorm(network))) == sorted(stuck)
    assert type(network["inner"][1]) is Own
    assert unmaskable_layers(nn.BatchNorm3d(2)) == [""]
    assert unmaskable_layers(ResNet18((3, 16, 16), 2, width=2, norm="batch")) == []
