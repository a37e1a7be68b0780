"""Right factors of layer gradients, and the matrices that they are made of, against plain linear algebra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cfl.engines.right_factors import RightFactor, multiply_gradients, projection_factor
from cfl.methods.components.layer_inputs.recursive_inverse import factor, inverse_with, normalised
from cfl.methods.components.layer_inputs.residual import ResidualInputs
from cfl.methods.components.subspace import choose_rank


def orthonormal(m: int, d: int, r: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(m, d, r, generator=generator, dtype=torch.float64))[0]


@pytest.mark.parametrize("kernel", [(12,), (3, 2, 2)])
@pytest.mark.parametrize("positions", [None, [2, 0]])
def test_gradients_are_multiplied_client_by_client(kernel: tuple[int, ...], positions: list[int] | None) -> None:
    torch.manual_seed(0)
    gradient, other = torch.randn(3, 5, *kernel, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    concerned = [0, 1, 2] if positions is None else positions
    places = None if positions is None else torch.tensor(positions)
    basis, full = orthonormal(len(concerned), 12, 4), torch.randn(len(concerned), 12, 12, dtype=torch.float64)
    for factor_, matrices in (
        (RightFactor(full, positions=places), full),
        (RightFactor(basis, True, places), torch.eye(12) - basis @ basis.mT),
    ):
        found = {"a": gradient.clone(), "b": other.clone()}
        multiply_gradients(found, {"a": factor_, "absent": factor_})
        for client in range(3):
            rows = gradient[client].flatten(1)
            if client in concerned:
                rows = rows @ matrices[concerned.index(client)]
            torch.testing.assert_close(found["a"][client].flatten(1), rows)
        assert torch.equal(found["b"], other)


def test_multiplying_the_inputs_is_multiplying_the_gradient() -> None:
    """``delta^T (a F)`` is ``(delta^T a) F``, in both forms of F."""
    torch.manual_seed(0)
    a, delta = torch.randn(3, 6, 9, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    symmetric = torch.randn(3, 9, 9, dtype=torch.float64)
    for right in (RightFactor(symmetric + symmetric.mT), RightFactor(orthonormal(3, 9, 2), True)):
        gradient = delta.mT @ a
        torch.testing.assert_close(delta.mT @ right.times(a), right.times(gradient))


def test_memory_formats_other_than_the_plain_one_are_written_in_place() -> None:
    gradient = torch.randn(2, 4, 3, 2, 2).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    before, strides = gradient.clone(), gradient.stride()
    basis = orthonormal(2, 12, 5).float()
    multiply_gradients({"w": gradient}, {"w": RightFactor(basis, True)})
    assert gradient.stride() == strides
    expected = before.flatten(2) @ (torch.eye(12) - basis @ basis.mT)
    torch.testing.assert_close(gradient.flatten(2), expected)


@pytest.mark.parametrize("r", [0, 1, 5, 6, 9, 12])
@pytest.mark.parametrize("steps", [1, 1000])
def test_both_forms_of_a_projection_agree(r: int, steps: int) -> None:
    columns = orthonormal(2, 12, 12)[:, :, :r].clone()
    columns[1, :, r // 2 :] = 0.0  # a client with fewer directions
    right = projection_factor(columns, outputs=20, steps=steps)
    rows = torch.randn(2, 20, 12, dtype=torch.float64)
    torch.testing.assert_close(right.times(rows), rows - (rows @ columns) @ columns.mT)
    cost = {True: 4 * 20 * 12 * r * steps, False: 2 * 20 * 12 * 12 * steps + 2 * 12 * 12 * r}
    assert cost[right.removes] == min(cost.values())


# Residual inputs


@pytest.mark.parametrize("pieces", [[3], [3, 4], [15], [2, 20, 3, 30]], ids=str)
@pytest.mark.parametrize("k", [0, 4])
def test_residual_inputs_have_the_singular_vectors_of_all_pieces(pieces: list[int], k: int) -> None:
    """Fewer inputs than dimensions, and more."""
    torch.manual_seed(1)
    basis = orthonormal(1, 15, 15)[0][:, :k]
    spectrum = torch.logspace(0, -2, 15, dtype=torch.float64)
    parts = [torch.randn(n, 15, dtype=torch.float64) * spectrum for n in pieces]
    inputs = ResidualInputs(basis)
    for part in parts:
        inputs.add(part)
    rows = torch.cat(parts).numpy()
    outside = rows.T - basis.numpy() @ (basis.numpy().T @ rows.T)
    u, sigma, _ = np.linalg.svd(outside, full_matrices=False)
    directions, values = inputs.principal()
    rank = min(len(rows), 15 - k)
    np.testing.assert_allclose(values[:rank], sigma[:rank], rtol=1e-9)
    np.testing.assert_allclose(values[rank:], 0, atol=1e-6)
    np.testing.assert_allclose(np.abs((u[:, :rank] * directions[:, :rank].numpy()).sum(0)), 1, rtol=1e-9)
    assert inputs.share == pytest.approx(np.linalg.norm(outside) / np.linalg.norm(rows), rel=1e-12)


def test_float32_inputs_have_no_more_directions_than_they_have() -> None:
    """The inputs have rank 40 except for rounding, which must not count as data at threshold 1."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 40, generator=generator) @ torch.randn(40, 200, generator=generator)
    inputs = ResidualInputs(torch.zeros(200, 0))
    for part in rows.split(300):
        inputs.add(part)
    _, values = inputs.principal()
    assert choose_rank(values, inputs.share, 1.0, "gpm", 0, 200) == 40


def test_no_inputs_have_no_directions() -> None:
    inputs = ResidualInputs(torch.zeros(5, 0))
    assert inputs.share == 0
    assert [tuple(t.shape) for t in inputs.principal()] == [(5, 0), (0,)]


# The recursive inverse


def semidefinite(d: int, rank: int, seed: int) -> Tensor:
    rows = torch.randn(rank, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-8])
def test_the_recursion_is_the_inverse_of_the_sum(damping: float) -> None:
    d, inverse, total = 20, None, torch.zeros(20, 20, dtype=torch.float64)
    for task in range(6):
        added = semidefinite(d, 7, task) + damping * torch.eye(d)
        inverse, total = inverse_with(inverse, added), total + added
        expected = np.linalg.inv(total.numpy())
        scale = np.abs(expected).max()
        np.testing.assert_allclose(inverse / scale, expected / scale, rtol=0, atol=1e-14 / min(damping, 1e-2))
        p, mean = normalised(inverse)
        assert float(p.trace()) == pytest.approx(d, rel=1e-12)
        torch.testing.assert_close(mean * p, inverse)


def test_a_state_in_float32_follows_the_inverse_of_the_sum() -> None:
    """``P`` is rounded to float32 after every task, as in a run. There are ten tasks with a damping of 0.01."""
    d, p, scale, total = 60, None, None, torch.zeros(60, 60, dtype=torch.float64)
    for task in range(10):
        curvature = semidefinite(d, 25, task)
        added = curvature + 1e-2 * curvature.diagonal().mean() * torch.eye(d)
        total += added
        exact, scale = normalised(inverse_with(None if p is None else scale * p.double(), added))
        p = exact.float()
    expected, _ = normalised(torch.linalg.inv(total))
    torch.testing.assert_close(p.double(), expected, rtol=0, atol=1e-5)


def test_a_factor_of_a_matrix_that_rounding_made_indefinite() -> None:
    vectors = orthonormal(1, 12, 12)[0]
    energies = torch.logspace(1, -7, 12, dtype=torch.float64)
    energies[-1] = -1e-8
    matrix = (vectors * energies) @ vectors.T
    lower = factor(matrix)
    torch.testing.assert_close(lower @ lower.T, matrix, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="not positive definite"):
        factor(-torch.eye(3, dtype=torch.float64))
