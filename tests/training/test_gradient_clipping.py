"""Clipping of clients' gradients is torch's clipping of each client's by itself, also in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cfl.training.gradient_clipping import clip_clients

SHAPES = ((3, 5), (7,), (), (0, 2))


def gradients(dtype: torch.dtype, scales: list[float]) -> list[Tensor]:
    """Gradients of a client for each scale, ``[k, ...]``."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(len(scales), *shape, generator=generator) for shape in SHAPES]
    return [(g * torch.tensor(scales).view(-1, *[1] * (g.ndim - 1))).to(dtype) for g in drawn]


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float64, [1e-4, 1.0, 1e4]),
        (torch.float32, [1e-4, 1.0, 1e4]),
        (torch.float16, [1e-4, 1.0, 300.0, 1e4]),  # squares below 6e-8 and above 65504
        (torch.bfloat16, [1e-4, 1.0, 1e15]),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [1e-4, 0.5, 1e3])
def test_every_clients_norm_is_clipped_as_by_torch(dtype: torch.dtype, scales: list[float], limit: float) -> None:
    found = gradients(dtype, scales)
    alone = [[nn.Parameter(g[row].double()) for g in found] for row in range(len(scales))]
    for row, parameters in enumerate(alone):
        for parameter, g in zip(parameters, found, strict=True):
            parameter.grad = g[row].double()
        nn.utils.clip_grad_norm_(parameters, limit)
    clip_clients(found, limit, by_value=False)
    rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else max(torch.finfo(dtype).eps * 8, 1e-14)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for row, parameters in enumerate(alone):
        for parameter, g in zip(parameters, found, strict=True):
            assert g.dtype == dtype
            torch.testing.assert_close(g[row].double(), parameter.grad, rtol=rounding, atol=least)


def test_float32_is_clipped_to_the_bit_as_in_kept_runs() -> None:
    found = gradients(torch.float32, [1e-4, 1.0, 1e4])
    squares = torch.stack([g.reshape(3, -1).square().sum(1) for g in found]).sum(0)
    factors = (0.5 / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    expected = [g * factors.view(-1, *[1] * (g.ndim - 1)) for g in found]
    clip_clients(found, 0.5, by_value=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
