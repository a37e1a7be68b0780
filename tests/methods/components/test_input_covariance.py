"""A sketch drawn from a covariance: against float64 sums, and against the sketch that multiplies row by row."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs import covariance as module
from cfl.methods.components.layer_inputs.covariance import (
    InputCovariance,
    by_lines,
    covariance_is_cheaper,
    draw_sketch,
)
from cfl.methods.components.layer_inputs.rows import layer_dim, layer_inputs
from cfl.methods.components.layer_inputs.sketch import LayerSketch
from cfl.methods.components.subspace import choose_rank, principal_directions, residual_share
from cfl.randomness.generators import torch_generator


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test"), dtype=dtype)


def orthonormal(d: int, k: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(d, k, seed=seed)).Q.float()


BY_LINES = [
    nn.Conv2d(3, 5, (3, 2), padding=(2, 1)),
    nn.Conv2d(2, 4, 3, padding=1, bias=False),
    nn.Conv2d(2, 4, (4, 3), stride=(1, 2)),
    nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(1, 2)),
    nn.Conv2d(1, 2, (8, 2)),  # one output line only
    nn.Conv2d(30, 2, 3, padding=1),
]
BY_ROWS = [
    nn.Linear(5, 3),
    nn.Linear(130, 2),
    nn.Conv2d(3, 2, 1),
    nn.Conv2d(3, 2, 3, stride=2, padding=1),
    nn.Conv2d(2, 2, 2, dilation=(2, 1)),
]


def some_input(layer: nn.Module, samples: int, seed: int = 0) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return normal(samples, layer.in_channels, 8, 7, seed=seed, dtype=torch.float32) + 0.5
    return normal(samples, layer.in_features, seed=seed, dtype=torch.float32) + 0.5


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("max_rows", [10, 4096])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("layer", [*BY_LINES, *BY_ROWS], ids=str)
def test_the_matrix_is_the_sum_over_all_rows(
    layer: nn.Module, with_bias: bool, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_bias and layer.bias is None:
        pytest.skip("the layer has no bias")
    monkeypatch.setattr(module, "_MAX_ROWS", max_rows)
    assert by_lines(layer) == (layer in BY_LINES)
    covariance = InputCovariance(layer, with_bias)
    expected, count = np.zeros((layer_dim(layer, with_bias),) * 2), 0
    for batch, samples in enumerate((4, 1, 7)):
        x = some_input(layer, samples, batch)
        covariance.add(layer, x)
        rows = torch.cat(list(layer_inputs(layer, x, with_bias))).double().numpy()
        for row in rows:
            expected += np.outer(row, row)
        count += len(rows)
    found = covariance.matrix()
    assert covariance.rows == count
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12 * expected.max())


def test_autocast_and_gradients_stay_out() -> None:
    layer, x = nn.Conv2d(3, 2, 3), normal(4, 3, 8, 8, dtype=torch.float32)
    basis = orthonormal(27, 5)
    sketches = []
    for precise in (True, False):
        covariance = InputCovariance(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not precise):
            covariance.add(layer, x.clone().requires_grad_(not precise))
            sketches.append(draw_sketch(covariance.matrix(), basis, 30, torch_generator(0, "z")))
    for plain, mixed in zip(*sketches, strict=True):
        assert torch.equal(plain, mixed)
        assert not mixed.requires_grad


# The draw


def test_a_drawn_sketch_is_the_root_of_the_residual_covariance_times_the_gaussian() -> None:
    for d, k, s in ((9, 4, 45), (100, 30, 70), (100, 0, 260)):
        x, basis = normal(3 * d, d, seed=1), orthonormal(d, k, seed=3)
        a, energy, residual = draw_sketch(x.T @ x, basis, s, torch_generator(5, "z"))
        o = basis.double().numpy()
        outside = np.array([row - o @ (o.T @ row) for row in x.numpy()])
        # The root of X^T X from the data themselves: V S V^T with X = U S V^T.
        _, lengths, directions = np.linalg.svd(outside, full_matrices=False)
        root, largest = directions.T * lengths @ directions, lengths[0]
        z = torch.randn(d, s, generator=torch_generator(5, "z")).double().numpy()
        assert a.dtype == torch.float32
        np.testing.assert_allclose(a.double().numpy(), root @ z, rtol=0, atol=1e-5 * largest)
        assert energy.item() == pytest.approx((x.numpy() ** 2).sum(), rel=1e-13)
        assert residual.item() == pytest.approx((outside**2).sum(), rel=1e-12)
        assert abs(o.T @ a.double().numpy()).max(initial=0) < 1e-5 * largest


def test_rounding_of_the_inputs_stays_rounding_in_the_sketch() -> None:
    """Behind a basis, with units that never fire, and with inputs that are sums of others."""
    d, basis = 40, orthonormal(40, 15, seed=3)
    x = normal(500, d, seed=1)
    x[:, 5:12] = 0
    x[:, 20] = x[:, 3] + x[:, 14]
    moved = x * (1 + 1e-7 * normal(500, d, seed=2))
    one, other = (draw_sketch(rows.T @ rows, basis, 60, torch_generator(0, "z"))[0] for rows in (x, moved))
    assert not torch.equal(one, other)
    assert (one - other).norm() < 2e-5 * one.norm()


def sketches_of(x: Tensor, basis: Tensor | None, s: int, seed: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Sketches of the same rows in both ways, with independent draws."""
    layer = nn.Linear(x.shape[1], 1)
    ways = {}
    for name, rows in (("direct", 0), ("covariance", 10**9)):
        sketch = LayerSketch(layer, False, s, basis, torch_generator(seed, name), rows)
        for part in x.split(50):
            sketch.add(layer, part)
        ways[name] = sketch.finish()
    assert not torch.equal(ways["direct"][0], ways["covariance"][0])
    return ways


def test_both_ways_have_the_same_distribution() -> None:
    """Mean, covariance within a column, independence of columns, and kurtosis 3, over 200,000 columns each."""
    d, s, basis = 6, 200_000, orthonormal(6, 2)
    x = normal(100, d, dtype=torch.float32) * torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, 0.1])
    outside = x.double() - x.double() @ basis.double() @ basis.double().T
    expected = outside.T @ outside
    largest = expected.max().item()
    for way, (a, energy, residual) in sketches_of(x, basis, s, 1).items():
        a = a.double()
        # standard errors: 0.0022 (mean), 0.0032 (variances), of the largest
        assert a.mean(1).abs().max() < 0.011 * math.sqrt(largest), way
        assert (a @ a.T / s - expected).abs().max() < 0.015 * largest, way
        assert (a[:, 1:] @ a[:, :-1].T / s).abs().max() < 0.015 * largest, way
        longest = a[expected.diagonal().argmax()]
        assert ((longest / longest.std()) ** 4).mean().item() == pytest.approx(3, abs=0.06), way
        assert energy.item() == pytest.approx(x.double().square().sum().item(), rel=1e-6), way
        assert residual.item() == pytest.approx(outside.square().sum().item(), rel=1e-6), way


@pytest.mark.parametrize("factor", [1, 5])
def test_both_ways_decide_for_the_same_ranks_up_to_sampling(factor: int) -> None:
    d, ranks = 60, {"direct": [], "covariance": []}
    basis = orthonormal(d, 20, seed=9)
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -0.6
    x = (normal(400, d, seed=2) * spectrum @ orthonormal(d, d, seed=4).double().T).float()
    for seed in range(30):
        for way, (a, energy, residual) in sketches_of(x, basis, factor * d, seed).items():
            values = principal_directions(a)[1]
            ranks[way].append(choose_rank(values, residual_share(energy, residual), 0.9, "code", 0, 40))
    spread = np.std(ranks["direct"] + ranks["covariance"])
    assert 5 < np.mean(ranks["direct"]) < 35
    assert abs(np.mean(ranks["direct"]) - np.mean(ranks["covariance"])) < 5 * spread * math.sqrt(2 / 30) + 1e-9
    assert spread < 1.5


def test_the_clients_sum_is_a_sketch_of_the_pooled_data() -> None:
    """Independent factors: a shared Z would give the sketch of a sum of factors instead."""
    d, s = 4, 100_000
    clients = [normal(20, d, seed=i) for i in range(3)]
    draws = [draw_sketch(x.T @ x, None, s, torch_generator(0, "z", i))[0] for i, x in enumerate(clients)]
    total = sum(draws).double()
    expected = sum(x.T @ x for x in clients)
    assert (total @ total.T / s - expected).abs().max() < 0.02 * expected.max()


# Rounding must not become a direction


def test_low_rank_inputs_leave_no_surplus_direction() -> None:
    for d, rank in ((48, 7), (300, 120)):
        layer = nn.Linear(d, 1)
        x = (normal(2000, rank, seed=1) @ normal(rank, d, seed=2)).float()
        covariance = InputCovariance(layer)
        covariance.add(layer, x)
        a, *_ = draw_sketch(covariance.matrix(), None, 2 * d, torch_generator(0, "z"))
        directions, values = principal_directions(a)
        assert values[rank] < 1e-6 * values[0] < values[rank - 1]
        assert choose_rank(values, 1.0, 1.0, "code", 0, d) == rank
        inside = torch.linalg.svd(x.double(), full_matrices=False).Vh[:rank].T
        off = directions[:, :rank] - inside @ (inside.T @ directions[:, :rank])
        assert off.abs().max() < 1e-5


def test_inputs_inside_the_basis_leave_a_share_that_counts_as_nothing() -> None:
    layer, basis = nn.Linear(300, 1), orthonormal(300, 200)
    x = normal(3000, 200, dtype=torch.float32) @ basis.T
    covariance = InputCovariance(layer)
    covariance.add(layer, x)
    a, energy, residual = draw_sketch(covariance.matrix(), basis, 300, torch_generator(0, "z"))
    rho = residual_share(energy, residual)
    assert rho < 1e-6
    assert choose_rank(principal_directions(a)[1], rho, 1.0, "code", 0, 100) == 0


def test_a_little_outside_the_basis_is_found_exactly() -> None:
    """With a ten-thousandth of the inputs' length outside, energy and directions are those of this part."""
    layer, basis, extra = nn.Linear(80, 1), orthonormal(80, 50), 6
    fresh = torch.linalg.qr(torch.cat([basis.double(), normal(80, extra, seed=7)], 1)).Q[:, 50:]
    x = (normal(2000, 50) @ basis.double().T + 1e-4 * normal(2000, extra, seed=1) @ fresh.T).float()
    covariance = InputCovariance(layer)
    covariance.add(layer, x)
    a, _, residual = draw_sketch(covariance.matrix(), basis, 400, torch_generator(0, "z"))
    outside = x.double() - x.double() @ basis.double() @ torch.linalg.pinv(basis.double())
    assert residual.item() == pytest.approx(outside.square().sum().item(), rel=1e-3)
    directions = principal_directions(a)[0][:, :extra]
    assert (fresh.T @ directions).square().sum().item() == pytest.approx(extra, rel=1e-4)


def test_nothing_full_and_broken() -> None:
    zero, nothing, _ = draw_sketch(torch.zeros(4, 4).double(), None, 8, torch_generator(0, "z"))
    assert torch.equal(zero, torch.zeros(4, 8))
    assert nothing == 0
    covariance = normal(9, 4).T @ normal(9, 4)
    full, energy, residual = draw_sketch(covariance, orthonormal(4, 4), 8, torch_generator(0, "z"))
    assert torch.equal(full, torch.zeros(4, 8))
    assert energy == covariance.trace()
    assert residual == 0
    covariance[1, 1] = math.nan
    assert bool(draw_sketch(covariance, None, 8, torch_generator(0, "z"))[0].isnan().all())


# The choice


def test_the_way_is_known_from_layer_rows_and_columns() -> None:
    # Permuted MNIST with 125 clients, and the default benchmark: as many rows as inputs, or fewer.
    for d, s, n in ((784, 784, 480), (400, 400, 480), (64, 320, 90), (200, 1000, 90)):
        assert not covariance_is_cheaper(nn.Linear(d, 1), n, d, s)
    # ResNet18 and AlexNet on a few images: many more.
    for channels, side, s, n in ((3, 3, 135, 88200), (32, 3, 1440, 88200), (128, 3, 5760, 6050), (3, 4, 48, 84100)):
        layer = nn.Conv2d(channels, 8, side)
        assert covariance_is_cheaper(layer, n, channels * side**2, s)
        assert not covariance_is_cheaper(layer, channels, channels * side**2, s)


def test_how_a_client_cuts_its_samples_changes_nothing() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    x, found = some_input(layer, 24), []
    for batch in (24, 5, 1):
        sketch = LayerSketch(layer, True, 95, None, torch_generator(0, "z"), 24 * 56)
        for part in x.split(batch):
            sketch.add(layer, part)
        found.append(sketch.finish()[0])
    for other in found[1:]:
        assert torch.allclose(other, found[0], rtol=0, atol=1e-5 * float(found[0].abs().max()))
