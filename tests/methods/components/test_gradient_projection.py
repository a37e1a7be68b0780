"""Refined gradients against formulas on flat vectors, and projections against their least squares problem."""

from __future__ import annotations

import pytest
import torch
from support.naive_replay import FORMULAS
from torch import Tensor

from cfl.methods.components.gradient_projection import (
    REFINEMENTS,
    Gradients,
    Refinement,
    conflicts,
    inner,
    refine,
)

SHAPES = {"conv.weight": (3, 2, 2, 2), "conv.bias": (3,), "scale": (), "head.weight": (4, 3)}
SIZE = 24 + 3 + 1 + 12
ALL = torch.ones(5, dtype=torch.bool)


def split(vectors: Tensor) -> dict[str, Tensor]:
    """``[k, SIZE]`` vectors as stacked tensors, in memory of their own."""
    parts = vectors.split([int(torch.Size(shape).numel()) for shape in SHAPES.values()], 1)
    return {n: p.reshape(len(vectors), *s).clone() for (n, s), p in zip(SHAPES.items(), parts, strict=True)}


def joined(gradients: Gradients) -> Tensor:
    return torch.cat([gradients[name].reshape(len(gradients[name]), -1) for name in SHAPES], 1)


def vectors(seed: int, rows: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def refined(g: Tensor, r: Tensor, rows: Tensor | None = None, how: Refinement = "project") -> Tensor:
    gradients, reference = split(g), split(r)
    rows = torch.ones(len(g), dtype=torch.bool) if rows is None else rows
    refine(gradients, reference, rows, inner(gradients, reference), inner(reference, reference), how)
    return joined(gradients)


def test_every_refinement_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(REFINEMENTS)


@pytest.mark.parametrize("shared", [False, True], ids=["a reference each", "one for all"])
@pytest.mark.parametrize("how", REFINEMENTS)
def test_refinements_are_their_formulas(how: Refinement, shared: bool) -> None:
    for seed in range(10):
        g, r = vectors(seed), vectors(100 + seed, 1 if shared else 5)
        expected = torch.stack([FORMULAS[how](a, b) for a, b in zip(g, r.expand_as(g), strict=True)])
        torch.testing.assert_close(refined(g, r, how=how), expected, rtol=1e-12, atol=1e-13)


def test_inner_products_and_conflicts() -> None:
    g, r = vectors(1), vectors(2)
    torch.testing.assert_close(inner(split(g), split(r)), (g * r).sum(1), rtol=1e-13, atol=1e-13)
    assert torch.equal(inner(split(g), split(r)) < 0, (g * r).sum(1) < 0)
    assert (inner(split(g), split(r)) < 0).unique().tolist() == [False, True]
    assert not (inner(split(g), split(torch.zeros_like(g))) < 0).any()
    assert inner(split(g.float()), split(r.float())).dtype == torch.float64


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 7.6294e-6), (torch.float64, 1.4211e-14)])
def test_a_gradient_conflicts_from_64_times_rounding_on(dtype: torch.dtype, bound: float, scale: float) -> None:
    """The condition is ``g . r < -64 eps |r|^2``, whatever the length of r and of the part of g across r."""
    r, across = torch.zeros(1, SIZE, dtype=torch.float64), torch.zeros(1, SIZE, dtype=torch.float64)
    r[0, 3], r[0, 30], across[0, 20] = 0.6 * scale, -0.8 * scale, scale
    for shares, expected in (
        ([-1.0, -1e-2, -1.01 * bound], True),
        ([-0.99 * bound, -0.01 * bound, 0.0, 0.01 * bound, 1.0], False),
    ):
        for aside in (0.0, bound, 1.0, 1e3):
            g, of = (torch.tensor(shares)[:, None].double() * r + aside * across).to(dtype), r.to(dtype)
            found = conflicts(inner(split(g), split(of)), inner(split(of), split(of)), dtype)
            assert found.tolist() == [expected] * len(shares)


def test_projection_of_conflicts_solves_the_constrained_least_squares_problem() -> None:
    """``min |g' - g|^2`` subject to ``g' . r >= 0`` (eq 4), solved by projected gradient steps on its dual.

    The dual is ``min_v |r|^2 v^2 / 2 + (g . r) v`` over ``v >= 0``, with ``g' = g + v r``.
    """
    changed = 0
    for seed in range(20):
        g, r = vectors(seed), vectors(50 + seed)
        found = refined(g, r, inner(split(g), split(r)) < 0)
        for row in range(len(g)):
            v = torch.zeros((), dtype=torch.float64)
            for _ in range(200):
                v = (v - 0.5 / (r[row] @ r[row]) * (v * (r[row] @ r[row]) + g[row] @ r[row])).clamp(min=0)
            torch.testing.assert_close(found[row], g[row] + v * r[row], rtol=1e-10, atol=1e-11)
            assert found[row] @ r[row] > -1e-10
            changed += int(v > 0)
            # No other feasible vector is closer.
            others = found[row] + 0.1 * vectors(1000 + seed, 50)
            feasible = others[(others @ r[row]) >= 0]
            assert ((feasible - g[row]).norm(dim=1) >= (found[row] - g[row]).norm() - 1e-12).all()
    assert 20 < changed < 80


@pytest.mark.parametrize("how", REFINEMENTS)
def test_only_the_rows_asked_for_are_changed(how: Refinement) -> None:
    g, r = vectors(5, dtype=torch.float32), vectors(6, dtype=torch.float32)
    rows = torch.tensor([True, False, False, True, False])
    found = refined(g, r, rows, how)
    assert torch.equal(found[~rows], g[~rows])
    assert (found[rows] != g[rows]).any(1).all()
    assert torch.equal(refined(g, r, torch.zeros(5, dtype=torch.bool), how), g)


@pytest.mark.parametrize("how", REFINEMENTS)
def test_a_reference_of_length_zero_changes_nothing(how: Refinement) -> None:
    g, r = vectors(7), vectors(8)
    r[2] = 0
    found = refined(g, r, how=how)
    assert torch.equal(found[2], g[2])
    assert (found[[0, 1, 3, 4]] != g[[0, 1, 3, 4]]).any(1).all()
    assert torch.equal(refined(g, torch.zeros(1, SIZE, dtype=torch.float64), how=how), g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 3.0, 1e-12])
def test_nothing_is_left_of_a_gradient_straight_against_the_reference(factor: float, dtype: torch.dtype) -> None:
    """The projection has no direction left, and what rounding leaves of it is not scaled up."""
    r = vectors(9, dtype=dtype)
    g = -factor * r
    close = 1e-6 * factor if dtype == torch.float32 else 1e-14 * factor
    assert refined(g, r).abs().max() <= close
    assert refined(g, r, how="project_and_scale").abs().max() <= close
    if factor == 1.0:
        assert refined(g, r, how="rotate").abs().max() <= close
        assert refined(g, r, how="average").abs().max() <= close
    assert not refined(torch.zeros_like(r), r).any()
    assert not refined(torch.zeros_like(r), r, how="rotate").any()


@pytest.mark.parametrize("how", REFINEMENTS)
def test_parameters_without_reference_count_as_zeros(how: Refinement) -> None:
    g, r = vectors(12), vectors(13)
    without = split(r)
    del without["conv.bias"]
    zeroed = split(r)
    zeroed["conv.bias"].zero_()
    assert torch.equal(inner(split(g), without), inner(split(g), zeroed))
    found, expected = split(g), split(g)
    refine(found, without, ALL, inner(found, without), inner(without, without), how)
    refine(expected, zeroed, ALL, inner(expected, zeroed), inner(zeroed, zeroed), how)
    torch.testing.assert_close(joined(found), joined(expected), rtol=1e-13, atol=1e-13)
    assert how in ("project_and_scale", "rotate", "average") or torch.equal(found["conv.bias"], split(g)["conv.bias"])


def test_tiny_gradients_are_projected_too() -> None:
    """Products of 1e-21 are still numbers in single precision."""
    g, r = 1e-12 * vectors(14, dtype=torch.float32), 1e-9 * vectors(15, dtype=torch.float32)
    rows = inner(split(g), split(r)) < 0
    assert torch.equal(rows, (g.double() * r.double()).sum(1) < 0)
    found = refined(g, r, rows).double()
    cosine = (found * r).sum(1) / (found.norm(dim=1) * r.double().norm(dim=1))
    assert (cosine > -1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_finds_the_same_conflicts(dtype: torch.dtype) -> None:
    """Gradients go back by 0.3 of the reference; squares of their entries are below float16's least number."""
    reference = vectors(2) * 1e-4
    sideways = vectors(3) * 1e-4
    sideways = (
        sideways - (sideways * reference).sum(1, keepdim=True) / reference.square().sum(1, keepdim=True) * reference
    )
    g, r = (sideways - 0.3 * reference).to(dtype), reference.to(dtype)
    gradients, against = split(g), split(r)
    product, length = inner(gradients, against), inner(against, against)
    torch.testing.assert_close(product, (g.double() * r.double()).sum(1), rtol=1e-5, atol=1e-12)
    assert conflicts(product, length, dtype).all()
    refine(gradients, against, ALL, product, length)
    left = (joined(gradients).double() * r.double()).sum(1) / length
    assert left.abs().max() < 4 * torch.finfo(dtype).eps
