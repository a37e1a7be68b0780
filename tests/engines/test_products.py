"""Matrix products by BLAS and by oneDNN: both are right, and oneDNN computes the large ones only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.tiny import needs_onednn
from torch import Tensor

from cfl.engines import products
from cfl.engines.products import WORTH_ONEDNN, OneDnnProducts, Products, products_of

LIBRARIES = ["blas", pytest.param("onednn", marks=needs_onednn)]
SIZES = [(64, 400, 300), (3, 7, 5), (1, 2048, 513)]


def matrix(rows: int, columns: int, transposed: bool) -> Tensor:
    made = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    assert made.is_contiguous() is not transposed or 1 in made.shape
    return made


def assert_product(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_is_that_of_float64(library: products.Library, size: tuple[int, int, int], transposed: tuple) -> None:
    torch.manual_seed(0)
    m, k, n = size
    left, right = matrix(m, k, transposed[0]), matrix(k, n, transposed[1])
    found = products_of(library).of(left, right)
    assert found.is_contiguous()
    assert_product(found, left.double() @ right.double())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_is_that_of_float64(library: products.Library, size: tuple[int, int, int], biased: bool) -> None:
    torch.manual_seed(0)
    m, k, n = size
    h, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n) if biased else None
    expected = h.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert_product(products_of(library).linear(h, weight, bias), expected)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("size", [*SIZES, (1000, 20, 300)])
@pytest.mark.parametrize("block", [1, 9000, products.BLOCK])
@pytest.mark.parametrize(("keep", "scale"), [(1.0, -0.1), (0.95, -0.1), (0, 1), (0, -2.0)])
def test_a_product_is_added_in_place(
    monkeypatch: pytest.MonkeyPatch,
    library: products.Library,
    size: tuple[int, int, int],
    block: int,
    keep: float,
    scale: float,
) -> None:
    """Products are added in blocks of rows, the last of which may be smaller. With keep = 0, old NaNs do not matter."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "BLOCK", block)
    m, k, n = size
    into, left, right = torch.randn(m, n), matrix(m, k, True), matrix(k, n, False)
    expected = keep * into.double() + scale * (left.double() @ right.double())
    if keep == 0:
        into.fill_(torch.nan)
    products_of(library).add(into, left, right, keep, scale)
    assert_product(into, expected)


class Counting(OneDnnProducts):
    """OneDnnProducts that count their calls of oneDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        call = self._linear

        def counted(*given: Tensor | None) -> Tensor:
            self.calls += 1
            return call(*given)  # type: ignore[arg-type]

        self._linear = counted


@needs_onednn
def test_small_products_vectors_and_other_types_are_torchs() -> None:
    """Small products, products with vectors and of float64 are computed by torch, with the same bits."""
    counting, plain = Counting(), Products()
    large = WORTH_ONEDNN // 64 // 16
    h, weight = torch.randn(64, large - 1), torch.randn(16, large - 1)
    doubles, vector = torch.randn(300, 300, dtype=torch.float64), torch.randn(2000, 1)
    for left, right in ((h, weight.t()), (doubles, doubles), (vector, vector.t()), (torch.randn(900, 2000), vector)):
        assert torch.equal(counting.of(left, right), plain.of(left, right))
        assert torch.equal(counting.linear(left, right.t(), None), plain.linear(left, right.t(), None))
        one, other = (torch.ones(left.shape[0], right.shape[1], dtype=left.dtype) for _ in range(2))
        counting.add(one, left, right, 0.9, -0.1)
        plain.add(other, left, right, 0.9, -0.1)
        assert torch.equal(one, other)
    assert counting.calls == 0
    left, right = torch.randn(64, large), torch.randn(large, 16)
    counting.of(left, right)
    counting.linear(left, right.t(), torch.randn(16))
    assert counting.calls == 2
    counting.add(torch.ones(64, 16), left, right, 1.0, 1.0)
    assert counting.calls == 3


@needs_onednn
def test_blocks_of_a_product_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 rows are cut into two blocks of 200, because oneDNN compiles a program for every shape."""
    counting = Counting()
    shapes: list[tuple[int, ...]] = []
    call = counting._linear
    counting._linear = lambda x, weight, bias: shapes.append(tuple(x.shape)) or call(x, weight, bias)  # type: ignore[func-returns-value]
    counting.add(torch.ones(400, 784), torch.randn(400, 64), torch.randn(64, 784), 1.0, 1.0)
    assert shapes == [(200, 64)] * 2


@needs_onednn
def test_steps_of_other_than_whole_batches_are_blas() -> None:
    of_batches = products_of("onednn", 32)
    by_onednn = {n for n in (16, 31, 32, 33, 64, 96) if of_batches.of_step(n).library == "onednn"}
    assert by_onednn == {32, 64, 96}
    assert of_batches.of_step(32) is of_batches
    assert products_of("onednn").of_step(7).library == "onednn"
    assert products_of("blas", 32).of_step(32).library == "blas"


@needs_onednn
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_products_can_be_recorded() -> None:
    """A recorded product gives the same bits and calls oneDNN, as its size demands."""
    counting = Counting()
    recording = torch.jit.trace(counting.of, (torch.randn(64, 400), torch.randn(400, 300)), check_trace=False)
    left, right = torch.randn(64, 400), torch.randn(400, 300)
    assert torch.equal(recording(left, right), counting.of(left, right))
    assert any("_linear" in str(node) for node in recording.graph.nodes())


@pytest.mark.parametrize("missing", ["backend", "operation"])
def test_without_onednn_it_is_blas(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def caches() -> list[Callable[..., object]]:
        return [products.available, products._linear, products.faster]

    def gone(*_: object) -> None:
        raise RuntimeError("Unknown builtin op: mkldnn::_linear_pointwise")

    try:
        for cached in caches():
            cached.cache_clear()  # type: ignore[attr-defined]
        if missing == "backend":
            monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        else:
            monkeypatch.setattr(torch.jit, "script", gone)
        assert not products.available()
        assert products.faster() == "blas"
        with pytest.raises(RuntimeError):
            products_of("onednn")
    finally:
        monkeypatch.undo()
        for cached in caches():
            cached.cache_clear()  # type: ignore[attr-defined]


@needs_onednn
@pytest.mark.parametrize("faster", ["blas", "onednn"])
def test_the_faster_library_is_measured_once(monkeypatch: pytest.MonkeyPatch, faster: str) -> None:
    """The faster library is measured once, on one math thread. The first call of each library does not count."""
    now, multiplied, threads = 0.0, [], torch.get_num_threads()

    def linear(self: Products, *_: Tensor | None) -> None:
        nonlocal now
        first = self.library not in multiplied
        multiplied.append(self.library)
        assert torch.get_num_threads() == 1
        now += (9.0 if self.library == faster else 5.0) if first else (1.0 if self.library == faster else 2.0)

    monkeypatch.setattr(products.time, "perf_counter", lambda: now)
    for kind in (Products, OneDnnProducts):
        monkeypatch.setattr(kind, "linear", linear)
    products.faster.cache_clear()
    try:
        assert products.faster() == faster
        assert multiplied.count("blas") == multiplied.count("onednn") == 5
        assert products.faster() == faster
        assert len(multiplied) == 10
        assert torch.get_num_threads() == threads
    finally:
        products.faster.cache_clear()
