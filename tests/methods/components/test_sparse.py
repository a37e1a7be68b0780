"""Which entries are kept, and what they cost, against plain Python."""

from __future__ import annotations

import pytest
import torch

from cfl.methods.components.sparse import SparseRows, index_bytes, kept_entries, largest, message_bytes
from cfl.randomness.generators import torch_generator


@pytest.mark.parametrize(
    ("fraction", "size", "kept"),
    # In floating point, 0.07 * 100 and 0.29 * 100 lie on the wrong side of 7 and 29.
    [(0.07, 100, 7), (0.29, 100, 29), (1.0, 5, 5), (0.1, 431_080, 43_108), (0.1, 11, 2), (1e-9, 3, 1), (1 / 3, 3, 1)],
)
def test_the_number_kept_is_that_of_the_fraction_as_written(fraction: float, size: int, kept: int) -> None:
    assert kept_entries(fraction, size) == kept


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.35, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_largest_are_kept_and_of_equal_ones_the_first(fraction: float, levels: int) -> None:
    values = torch.randint(levels, (4, 37), generator=torch_generator(0, "values")).float()
    mask = largest(values, fraction)
    assert mask.dtype == torch.bool
    for row, chosen in zip(values.tolist(), mask, strict=True):
        best = sorted(range(37), key=lambda i, row=row: (-row[i], i))[: kept_entries(fraction, 37)]  # type: ignore[misc]
        assert chosen.nonzero().flatten().tolist() == sorted(best)
        assert torch.equal(largest(torch.tensor(row), fraction), chosen)


def test_bytes_of_a_message() -> None:
    assert message_bytes(10, 1000, 4) == 10 * (4 + 4)
    assert message_bytes(10, 1000, 8) == 10 * (8 + 4)
    assert message_bytes(500, 1000, 4) == 4000 == message_bytes(501, 1000, 4)  # whole from here on
    assert message_bytes(1000, 1000, 4) == 4000
    assert message_bytes(0, 1000, 4) == 0
    assert (index_bytes(2**31), index_bytes(2**31 + 1)) == (4, 8)
    assert message_bytes(10, 2**31 + 1, 4) == 120


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("zeros", "whole"), [(0.8, False), (0.3, True), (0.0, True)])
def test_sparse_rows_are_the_dense_ones(dtype: torch.dtype, zeros: float, whole: bool) -> None:
    generator = torch_generator(0, "rows")
    dense = torch.randn(3, 40, dtype=dtype, generator=generator)
    dense[torch.rand(3, 40, generator=generator) < zeros] = 0
    dense[1] *= float(whole)
    rows = SparseRows.of(list(dense))
    assert rows.values.numel() == (dense.numel() if whole else int(torch.count_nonzero(dense)))
    assert torch.equal(rows.dense(5), torch.cat([dense, torch.zeros(2, 40, dtype=dtype)]))
    weights = torch.randn(3, dtype=dtype, generator=generator)
    torch.testing.assert_close(rows.combined(weights), weights @ dense)
    again = SparseRows(**rows.state_dict())
    assert torch.equal(again.dense(3), dense)
    assert torch.equal(again.combined(weights), rows.combined(weights))
