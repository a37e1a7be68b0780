"""Checked against float64 evaluations written out here, against torch's own layers, and against stated properties."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from cfl.methods.components.layer_inputs.rows import layer_dim, layer_inputs
from cfl.methods.components.layer_inputs.sketch import Sketch, sketch_rows
from cfl.methods.components.subspace import (
    choose_rank,
    grow_basis,
    principal_directions,
    project,
    project_with_bias,
    residual_share,
    used_share,
)
from cfl.randomness.generators import torch_generator


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch_generator(seed, "test"), dtype=dtype)


def orthonormal(d: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linalg.qr(normal(d, k, seed=seed)).Q.to(dtype)


def projector(basis: Tensor) -> Tensor:
    return basis.double() @ basis.double().T


def data_with_spectrum(energies: Tensor, n: int, seed: int) -> Tensor:
    """Rows [n, d] whose squared singular values are exactly `energies` [d]."""
    d = len(energies)
    return orthonormal(n, d, seed) * energies.sqrt() @ orthonormal(d, d, seed + 1).T


CONVS = [
    nn.Conv2d(3, 5, (3, 2), stride=2, padding=(2, 1)),
    nn.Conv2d(4, 6, 3, stride=(1, 3), padding=1, dilation=(2, 1)),
    nn.Conv2d(2, 7, 1, stride=2, bias=False),
    nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2)),
    nn.Conv2d(3, 4, (2, 5), padding="valid"),
]
# side of an image with few enough patches to leave room outside their span
FEW_PATCHES = dict(zip(CONVS, (3, 6, 1, 3, 5), strict=True))
LINEAR = nn.Linear(60, 9)
CASES = [(layer, bias) for layer in [LINEAR, *CONVS] for bias in ([False, True] if layer.bias is not None else [False])]


def fixed(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with the same parameters in every run."""
    layer = copy.deepcopy(layer).to(dtype)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = normal(*parameter.shape, seed=100 + i, dtype=dtype)
    return layer


# Layer inputs


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("conv", "with_bias"), [case for case in CASES if case[0] is not LINEAR], ids=str)
def test_a_convolution_is_its_weight_on_its_rows(conv: nn.Module, with_bias: bool) -> None:
    conv = fixed(conv, torch.float64)
    x = normal(3, conv.in_channels, 9, 11)
    rows = torch.cat(list(layer_inputs(conv, x, with_bias, max_rows=17)))
    out = conv(x)
    weight = conv.weight.flatten(1)
    if with_bias:
        weight = torch.cat([weight, conv.bias[:, None]], 1)
    elif conv.bias is not None:
        out = out - conv.bias.view(1, -1, 1, 1)
    assert rows.shape == (3 * out.shape[2] * out.shape[3], layer_dim(conv, with_bias))
    images_first = out.permute(0, 2, 3, 1).flatten(0, 2)
    assert torch.allclose(rows @ weight.T, images_first, rtol=0, atol=1e-13)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_is_its_weight_on_its_rows(with_bias: bool) -> None:
    layer = fixed(nn.Linear(7, 4), torch.float64)
    x = normal(5, 3, 7)
    rows = torch.cat(list(layer_inputs(layer, x, with_bias, max_rows=4)))
    weight = torch.cat([layer.weight, layer.bias[:, None]], 1) if with_bias else layer.weight
    out = layer(x) if with_bias else layer(x) - layer.bias
    assert layer_dim(layer, with_bias) == 7 + with_bias
    assert torch.allclose(rows @ weight.T, out.flatten(0, 1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 11, 12, 13, 40, 41, 95, 10**6])
@pytest.mark.parametrize("layer", [*CONVS, nn.Linear(11, 2)], ids=str)
def test_cutting_into_pieces_changes_neither_values_nor_order(layer: nn.Module, max_rows: int) -> None:
    x = normal(4, getattr(layer, "in_channels", 3), 8, 11)
    pieces = list(layer_inputs(layer, x, max_rows=max_rows))
    assert max(len(p) for p in pieces) <= max_rows
    assert torch.equal(torch.cat(pieces), torch.cat(list(layer_inputs(layer, x, max_rows=10**9))))


# Projection


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("layer", "with_bias"), CASES, ids=str)
def test_a_projected_update_leaves_old_outputs_and_moves_new_ones(layer: nn.Module, with_bias: bool) -> None:
    side = FEW_PATCHES.get(layer, 0)
    layer = fixed(layer, torch.float32)
    d = layer_dim(layer, with_bias)
    if isinstance(layer, nn.Linear):
        old, new = normal(12, 60, dtype=torch.float32), normal(50, 60, seed=1, dtype=torch.float32)
    else:
        old = normal(1, layer.in_channels, side, side, dtype=torch.float32)
        new = normal(2, layer.in_channels, 9, 9, seed=1, dtype=torch.float32)
    rows = torch.cat(list(layer_inputs(layer, old, with_bias)))
    basis = grow_basis(None, rows.T)
    assert 0 < basis.shape[1] < d

    weight_update = normal(*layer.weight.shape, seed=2, dtype=torch.float32)
    bias_update = normal(len(layer.weight), seed=3, dtype=torch.float32) if with_bias else None
    before_old, before_new = layer.double()(old.double()), layer(new.double())
    if bias_update is not None:
        weight_update, bias_update = project_with_bias(weight_update, bias_update, basis)
    else:
        weight_update = project(weight_update, basis)
    with torch.no_grad():
        layer.weight += weight_update
        if bias_update is not None:
            assert bias_update.abs().max() > 1e-3, "the bias must learn too, or nothing is shown"
            layer.bias += bias_update
    assert (layer(old.double()) - before_old).abs().max() < 1e-5
    assert (layer(new.double()) - before_new).abs().max() > 0.1


def test_projection_matches_the_explicit_sum_over_basis_vectors() -> None:
    delta, basis = normal(4, 2, 3, 2), orthonormal(12, 5)
    expected = delta.clone().view(4, 12)
    for o in range(4):
        row = delta.view(4, 12)[o]
        for j in range(5):
            expected[o] -= sum(row[i] * basis[i, j] for i in range(12)) * basis[:, j]
    out = project(delta, basis)
    assert out.shape == delta.shape
    assert torch.allclose(out.view(4, 12), expected, rtol=0, atol=1e-14)
    assert torch.allclose(project(out, basis), out, rtol=0, atol=1e-14)


def test_projection_edges() -> None:
    delta = normal(4, 6, dtype=torch.float32)
    assert project(delta, None) is delta
    assert project(delta, torch.zeros(6, 0)) is delta
    assert torch.equal(project(delta, orthonormal(6, 6, dtype=torch.float32)), torch.zeros(4, 6))
    assert project(delta, orthonormal(6, 2)).dtype == torch.float32
    with pytest.raises(ValueError, match="does not fit"):
        project(delta, orthonormal(5, 2))
    with pytest.raises(ValueError, match="does not fit"):
        project(normal(6), orthonormal(6, 2))


# Sketch


def test_a_sketch_is_the_residual_times_the_gaussian() -> None:
    x, g, basis = normal(30, 8, seed=1), normal(30, 11, seed=2), orthonormal(8, 3, seed=3)
    sketch = Sketch(8, 11, dtype=torch.float64)
    for piece in torch.arange(30).split(7):
        sketch.add(x[piece], basis, g[piece])
    columns = [x[j] - basis @ (basis.T @ x[j]) for j in range(30)]
    expected = sum(torch.outer(c, g[j]) for j, c in enumerate(columns))
    assert torch.allclose(sketch.A, expected, rtol=0, atol=1e-13)
    assert sketch.rows == 30
    assert sketch.input_energy.item() == pytest.approx(sum(v * v for v in x.flatten().tolist()), rel=1e-13)
    assert sketch.residual_energy.item() == pytest.approx(sum(float(c @ c) for c in columns), rel=1e-13)


def test_the_sum_of_clients_sketches_is_the_sketch_of_their_pooled_data() -> None:
    sizes, d, s = [5, 40, 1, 18], 12, 30
    basis = orthonormal(d, 4, dtype=torch.float32)
    inputs = [normal(n, d, seed=i, dtype=torch.float32) for i, n in enumerate(sizes)]
    clients = []
    for i, x in enumerate(inputs):
        clients.append(Sketch(d, s))
        sketch_rows(clients[-1], x.split(8), basis, torch_generator(0, "sketch", i))
    draws = []
    for i, n in enumerate(sizes):
        generator = torch_generator(0, "sketch", i)
        draws += [torch.randn(len(p), s, generator=generator) for p in torch.arange(n).split(8)]
    pooled, g = torch.cat(inputs).double(), torch.cat(draws).double()
    residual = pooled - pooled @ projector(basis)
    assert torch.allclose(sum(c.A for c in clients).double(), residual.T @ g, rtol=0, atol=2e-5)
    rho = residual_share(sum(c.input_energy for c in clients), sum(c.residual_energy for c in clients))
    assert rho == pytest.approx((residual.norm() / pooled.norm()).item(), rel=1e-6)
    assert sum(c.rows for c in clients) == len(pooled)


def test_the_expected_sketch_energy_is_s_times_the_data_covariance() -> None:
    x = normal(50, 4, seed=5) * torch.tensor([3.0, 1.0, 1.0, 0.3])
    sketch = Sketch(4, 40_000, dtype=torch.float64)
    sketch_rows(sketch, [x], None, torch_generator(0, "wide"))
    covariance = x.T @ x
    # entries of A A^T / s average 40 000 products: standard error below 1/100 of the largest energy
    assert torch.allclose(sketch.A @ sketch.A.T / 40_000, covariance, rtol=0, atol=0.03 * covariance.max().item())


def test_autocast_and_gradients_stay_out_of_a_sketch() -> None:
    x, basis = normal(40, 16, dtype=torch.float32).requires_grad_(), orthonormal(16, 5, dtype=torch.float32)
    plain, mixed = Sketch(16, 20), Sketch(16, 20)
    sketch_rows(plain, [x], basis, torch_generator(0, "g"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sketch_rows(mixed, [x], basis, torch_generator(0, "g"))
    assert torch.equal(plain.A, mixed.A)
    assert torch.equal(plain.residual_energy, mixed.residual_energy)
    assert not plain.A.requires_grad
    assert not plain.input_energy.requires_grad


def test_energies_keep_precision_over_many_small_pieces() -> None:
    sketch = Sketch(4, 1)
    row = torch.full((1, 4), 0.05)
    sketch.add(torch.full((1, 4), 1e4), None, torch.zeros(1, 1))
    for _ in range(2000):
        sketch.add(row, None, torch.zeros(1, 1))
    # in a float32 running sum every 0.01 would vanish next to 4e8
    assert sketch.input_energy.item() - 4e8 == pytest.approx(2000 * 0.01, rel=1e-4)


def test_residual_share() -> None:
    assert residual_share(torch.tensor(8.0), torch.tensor(2.0)) == 0.5
    assert residual_share(0.0, 0.0) == 0.0
    assert residual_share(1.0, 1.0 + 1e-7) == 1.0
    assert residual_share(1.0, -1e-9) == 0.0


def test_inputs_inside_the_basis_leave_a_share_that_counts_as_nothing() -> None:
    basis = orthonormal(300, 200, dtype=torch.float32)
    x = normal(500, 200, dtype=torch.float32) @ basis.T
    sketch = Sketch(300, 300)
    sketch_rows(sketch, [x], basis, torch_generator(0, "g"))
    rho = residual_share(sketch.input_energy, sketch.residual_energy)
    values = principal_directions(sketch.A)[1]
    assert 0 < rho < 1e-6
    assert choose_rank(values, rho, 1.0, "code", 0, 100) == 0
    assert choose_rank(values, rho, 1.0, "gpm", 0, 100) == 0


# Rank


def naive_rank(values: list[float], rho: float, threshold: float, rule: str, minimum: int, room: int) -> int:
    total = sum(v * v for v in values)
    r = 0
    while r < len(values):
        share = sum(v * v for v in values[:r]) / total
        if rule == "code" and share > 1 - (1 - threshold) / rho:
            break
        if rule == "gpm" and rho * rho * share + (1 - rho * rho) >= threshold:
            break
        r += 1
    return min(max(r, minimum), room)


@pytest.mark.parametrize("rule", ["code", "gpm"])
def test_ranks_match_a_plain_loop_on_random_spectra(rule: str) -> None:
    ranks = set()
    for seed in range(300):
        m, rho, threshold = torch.rand(3, generator=torch_generator(seed, "spectrum"), dtype=torch.float64).tolist()
        m, rho, threshold = 1 + int(40 * m), 0.02 + 0.98 * rho, 0.5 + 0.499 * threshold
        values = normal(m, seed=seed).abs().sort(descending=True).values + 1e-3
        minimum, room = seed % 3, 5 + seed % 40
        expected = naive_rank(values.tolist(), rho, threshold, rule, min(minimum, m), room)
        assert choose_rank(values, rho, threshold, rule, minimum, room) == expected, (seed, rho, threshold)
        ranks.add(expected)
    assert len(ranks) > 12  # the spectra exercise more than the ends


def test_the_two_rules_keep_90_and_95_percent_of_the_total_energy() -> None:
    # 1000 equal directions, a residual of half the norm and so a quarter of the energy, threshold 0.9:
    # GPM asks f >= 1 - 0.1/0.25 = 0.6, the authors' code f > 1 - 0.1/0.5 = 0.8
    values = torch.ones(1000, dtype=torch.float64)
    gpm, code = (choose_rank(values, 0.5, 0.9, rule, 0, 1000) for rule in ("gpm", "code"))
    assert abs(gpm - 600) <= 1  # 0.6 has no exact binary form
    assert abs(code - 801) <= 1
    assert 0.75 + 0.25 * gpm / 1000 == pytest.approx(0.90, abs=3e-4)
    assert 0.75 + 0.25 * code / 1000 == pytest.approx(0.95, abs=3e-4)


@pytest.mark.parametrize(
    ("values", "rho", "threshold", "rule", "minimum", "room", "rank"),
    [
        ([2.0, 2.0, 2.0, 2.0], 1.0, 0.75, "gpm", 0, 9, 3),  # f_3 = 3/4 reaches
        ([2.0, 2.0, 2.0, 2.0], 1.0, 0.75, "code", 0, 9, 4),  # ... but does not exceed
        ([2.0, 1.0], 1.0, 0.79, "code", 0, 9, 1),  # f_1 = 4/5
        ([2.0, 1.0], 0.25, 0.75, "code", 0, 9, 1),  # f > 0: not yet at r = 0
        ([2.0, 1.0], 0.25, 0.70, "code", 0, 9, 0),  # f > -0.2: nothing needed
        ([2.0, 1.0], 0.25, 0.70, "code", 1, 9, 1),  # ... unless one is forced
        ([2.0, 1.0], 0.5, 0.75, "gpm", 0, 9, 0),  # the basis holds 3/4 already
        ([2.0, 1.0], 1.0, 0.99, "code", 0, 1, 1),  # no more than fits
        ([2.0, 1.0], 1.0, 0.99, "code", 1, 0, 0),  # full
        ([2.0, 1.0], 1.0, 0.99, "code", 5, 9, 2),  # no more than there are
        ([3.0, 1.0, 0.1, 0.0, 0.0], 1.0, 1.0, "code", 0, 9, 3),  # never exceeded: all that is not zero
        ([3.0, 1.0, 0.1, 1e-8, 0.0], 1.0, 1.0, "gpm", 0, 9, 3),  # rounding is no direction
        ([3.0, 1.0, 0.1], 1e-3, 1.0, "code", 0, 9, 3),
        ([3.0, 1.0, 0.1], 1e-3, 0.9999, "code", 0, 9, 2),  # f > 0.9: f_1 = 0.8991
        ([3.0, 1.0, 0.1], 1e-3, 0.9999, "gpm", 0, 9, 0),
        ([3.0, 1.0, 0.1], 1e-300, 0.9, "code", 0, 9, 0),
        ([3.0, 1.0, 0.1], 0.0, 1.0, "code", 0, 9, 0),
        ([0.0, 0.0], 0.0, 0.9, "code", 1, 9, 0),  # a dead layer has no direction to force
        ([], 1.0, 0.9, "gpm", 1, 9, 0),
        ([3.0, 1.0], 1.0, 0.0, "code", 0, 9, 1),
        ([3.0, 1.0], 1.0, 0.0, "gpm", 0, 9, 0),
    ],
)
def test_ranks_by_hand(
    values: list[float], rho: float, threshold: float, rule: str, minimum: int, room: int, rank: int
) -> None:
    assert choose_rank(torch.tensor(values), rho, threshold, rule, minimum, room) == rank  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.99])
def test_the_gpm_rule_covers_its_threshold_and_no_direction_more(threshold: float) -> None:
    """With the exact factor X^T in place of the sketch: the captured energy is counted on the data themselves."""
    basis = None
    for task in range(4):
        x = data_with_spectrum(torch.arange(1, 41, dtype=torch.float64) ** -1.5, 200, seed=10 * task)
        residual = x if basis is None else x - x @ projector(basis)
        directions, values = principal_directions(residual.T)
        rho = residual_share(x.norm() ** 2, residual.norm() ** 2)
        k = 0 if basis is None else basis.shape[1]
        ranks = {rule: choose_rank(values, rho, threshold, rule, 0, 40 - k) for rule in ("gpm", "code")}

        def captured(r: int, directions: Tensor = directions, basis: Tensor | None = basis, x: Tensor = x) -> float:
            grown = grow_basis(basis, directions[:, :r])
            return float((x @ grown.double()).norm() ** 2 / x.norm() ** 2)

        assert captured(ranks["gpm"]) >= threshold - 1e-6
        assert ranks["gpm"] == 0 or captured(ranks["gpm"] - 1) < threshold
        assert captured(ranks["code"]) >= 1 - rho * (1 - threshold) - 1e-6
        assert ranks["code"] >= ranks["gpm"]
        basis = grow_basis(basis, directions[:, : ranks["gpm"]])


# Principal directions


@pytest.mark.parametrize(("d", "s"), [(12, 12), (12, 60), (12, 5), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_principal_directions_are_the_left_singular_vectors(d: int, s: int, dtype: torch.dtype) -> None:
    a = normal(d, s, dtype=dtype)
    directions, values = principal_directions(a)
    u, expected, _ = torch.linalg.svd(a.double(), full_matrices=False)
    m = min(d, s)
    assert directions.shape == (d, m)
    assert directions.dtype == values.dtype == torch.float64
    assert torch.allclose(values, expected, rtol=1e-10, atol=0)
    assert torch.allclose(directions.T @ directions, torch.eye(m, dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.allclose((directions * u).sum(0).abs(), torch.ones(m, dtype=torch.float64), rtol=0, atol=1e-10)


def test_signs_do_not_depend_on_the_sketch_sign() -> None:
    a = normal(9, 30)
    assert torch.allclose(principal_directions(a)[0], principal_directions(-a)[0], rtol=0, atol=1e-12)
    for b in (a, a[:, :4]):
        directions = principal_directions(b)[0]
        assert bool((directions.max(0).values >= -directions.min(0).values).all())


def test_a_sketch_with_nan_is_refused() -> None:
    a = normal(4, 8)
    a[2, 3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        principal_directions(a)


# Growth


def test_the_basis_stays_orthonormal_and_keeps_every_old_column() -> None:
    d, basis, history = 256, None, []
    for task in range(20):
        size = 0 if basis is None else basis.shape[1]
        # neither unit, nor orthogonal to each other or to the old basis
        grown = grow_basis(basis, normal(d, 10, seed=task) * 10.0 ** (task % 7 - 3))
        assert grown.dtype == torch.float32
        assert grown.shape == (d, size + 10)
        history.append(grown)
        basis = grown
    gram = basis.double().T @ basis.double()
    assert (gram - torch.eye(200, dtype=torch.float64)).abs().max() < 1e-6
    for old in history:
        assert torch.equal(basis[:, : old.shape[1]], old)


def test_the_grown_basis_spans_old_and_new() -> None:
    old, new = orthonormal(30, 6, dtype=torch.float32), normal(30, 5, seed=1)
    grown = grow_basis(old, new)
    joined = torch.linalg.qr(torch.cat([old.double(), new], 1)).Q
    assert (projector(grown) - projector(joined)).abs().max() < 1e-6
    for r in range(6):  # most important first: any prefix of the directions gives a prefix of the basis
        assert torch.allclose(grow_basis(old, new[:, :r]), grown[:, : 6 + r], rtol=0, atol=1e-6)


def test_directions_inside_the_old_span_are_dropped() -> None:
    old = orthonormal(40, 10, dtype=torch.float32)
    inside, fresh = old.double() @ normal(10, 3), normal(40, 2, seed=1)
    mixed = torch.stack([inside[:, 0], fresh[:, 0], inside[:, 1], fresh[:, 1], inside[:, 2]], 1).float()
    assert grow_basis(old, mixed).shape == (40, 12)
    assert torch.equal(grow_basis(old, inside.float()), old)
    assert torch.equal(grow_basis(old, torch.zeros(40, 3)), old)


def test_directions_that_barely_leave_the_old_span_are_still_made_orthogonal_to_it() -> None:
    old = orthonormal(200, 120, dtype=torch.float32)
    grown = grow_basis(old, old.double() @ normal(120, 10) + 1e-3 * normal(200, 10, seed=1))
    assert grown.shape == (200, 130)
    assert (grown.double().T @ grown.double() - torch.eye(130)).abs().max() < 1e-6


def test_dependent_directions_are_dropped_and_none_that_follows_is_lost() -> None:
    e = torch.eye(5)
    grown = grow_basis(None, torch.stack([e[0], e[0], 2 * e[0], e[1], e[0] + e[1], e[3], e[3] - e[1]], 1))
    assert grown.shape == (5, 3)
    assert torch.allclose(projector(grown), torch.diag(torch.tensor([1.0, 1, 0, 1, 0])).double(), rtol=0, atol=1e-7)


def test_a_full_basis_freezes_its_layer() -> None:
    basis = grow_basis(orthonormal(12, 8, dtype=torch.float32), normal(12, 12, seed=4))
    assert basis.shape == (12, 12)
    assert (basis.double().T @ basis.double() - torch.eye(12)).abs().max() < 1e-6
    assert torch.equal(project(normal(3, 12, dtype=torch.float32), basis), torch.zeros(3, 12))
    assert torch.equal(grow_basis(basis, normal(12, 4)), basis)
    assert used_share(basis, 12) == 1.0


def test_growing_by_nothing() -> None:
    old = orthonormal(9, 3, dtype=torch.float32)
    assert torch.equal(grow_basis(old, torch.zeros(9, 0)), old)
    assert grow_basis(None, torch.zeros(9, 0)).shape == (9, 0)
    assert grow_basis(orthonormal(9, 3), normal(9, 2)).dtype == torch.float64


def test_used_share() -> None:
    assert used_share(None, 27) == 0.0
    assert used_share(torch.zeros(27, 0), 27) == 0.0
    assert used_share(orthonormal(20, 5), 20) == 0.25


# The whole extraction


def test_partitions_of_the_same_low_rank_data_agree() -> None:
    d, s, n = 64, 128, 600
    x = (normal(n, 9, seed=1) @ normal(9, d, seed=2)).float()
    old = orthonormal(d, 5, seed=3, dtype=torch.float32)
    shuffled = torch.randperm(n, generator=torch_generator(0, "shuffle"))
    partitions = [x.split(100), x[shuffled].split(37), [x], x[x[:, 0].argsort()].split(200)]
    projectors, shares = [], []
    for p, parts in enumerate(partitions):
        clients = [Sketch(d, s) for _ in parts]
        for i, (sketch, part) in enumerate(zip(clients, parts, strict=True)):
            sketch_rows(sketch, part.split(64), old, torch_generator(p, "sketch", i))
        rho = residual_share(sum(c.input_energy for c in clients), sum(c.residual_energy for c in clients))
        directions, values = principal_directions(sum(c.A for c in clients))
        rank = choose_rank(values, rho, 1.0, "code", 0, d - 5)
        projectors.append(projector(grow_basis(old, directions[:, :rank])))
        shares.append(rho)
    exact = projector(torch.linalg.qr(torch.cat([old.double(), x.double().T @ normal(n, 9, seed=8)], 1)).Q)
    for share, found in zip(shares, projectors, strict=True):
        assert share == pytest.approx(shares[0], rel=1e-6)
        assert (found - exact).abs().max() < 1e-5
    assert exact.trace().item() == pytest.approx(14)


def test_a_wide_sketch_finds_the_rank_that_a_square_one_underestimates() -> None:
    d = 100
    x = data_with_spectrum(torch.arange(1, d + 1, dtype=torch.float64) ** -1.5, 1000, seed=7)
    for threshold in (0.87, 0.94):
        ranks = {}
        for factor in (1, 5):
            sketch = Sketch(d, factor * d, dtype=torch.float64)
            sketch_rows(sketch, x.split(250), None, torch_generator(3, "sketch", factor))
            ranks[factor] = choose_rank(principal_directions(sketch.A)[1], 1.0, threshold, "code", 0, d)
        exact = choose_rank(principal_directions(x.T)[1], 1.0, threshold, "code", 0, d)
        assert ranks[1] < exact - 1
        assert exact - 4 <= ranks[5] <= exact
        assert ranks[1] < ranks[5]
