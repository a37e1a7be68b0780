"""The covariance of a layer's inputs, and sketches drawn from it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cfl.methods.components.layer_inputs.rows import conv_padding, layer_dim, layer_inputs

_MAX_ROWS = 4096

# Float64 products take twice the time of float32 ones; of a symmetric product in four strips, 5/8 are computed.
_SYMMETRIC = 2 * 5 / 8

# Time of drawing one normal number, in float32 multiplications (measured: 3.4 ns against 1/40 ns).
_NORMAL = 130

# The eigenvectors of a covariance and the product that is its root, in float32 multiplications over d^3 (measured).
_ROOT = 9


class InputCovariance:
    """``C = sum_j x_j x_j^T`` over a layer's input vectors ``x_j [d]``, batch by batch.

    The vectors are those of :func:`cfl.methods.components.layer_inputs.rows.layer_inputs`. By default products are
    float64, because the singular values of a sketch drawn from ``C`` are square roots of its eigenvalues: in float32
    singular values that are 0 would come out as 3e-4 of the largest.

    A convolution with vertical stride 1 needs no patches. With ``l_t`` the vector of all values that a patch sees of
    padded image line t (``channels * kw`` long, one per horizontal position), the block of kernel lines i and i + a is
    ``sum_u l_{u+i} l_{u+i+a}^T`` over output lines u. For different i, only its first and last terms differ. So kh
    products of whole images and some products of single lines are enough for all kh^2 blocks.

    Args:
        layer: see :func:`cfl.methods.components.layer_inputs.rows.layer_dim`.
        with_bias: append an input that is always 1.
        dtype: of products and sums. float32 takes a third of the time, and is enough where ``C`` is sent in float32.

    Attributes:
        rows: number of input vectors so far.
    """

    def __init__(
        self,
        layer: nn.Module,
        with_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._d = layer_dim(layer, with_bias)
        self._with_bias, self._dtype = with_bias, dtype
        self._by_lines = by_lines(layer)
        self.rows = 0
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        if isinstance(layer, nn.Conv2d) and self._by_lines:
            kh, kw = layer.kernel_size
            self._kernel = (kh, layer.in_channels, kw)
            width = layer.in_channels * kw
            self._blocks = zeros(kh, kh, width, width)
            self._sums = zeros(kh, width)
        else:
            self._gram = zeros(self._d, self._d)

    @torch.no_grad()
    def add(self, layer: nn.Module, x: Tensor) -> None:
        """Add inputs of ``layer``, or of a copy of it; they are not stored."""
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(layer, nn.Conv2d) and self._by_lines:
                for lines in _image_lines(layer, x, self._dtype):
                    self._add_lines(lines)
                return
            for rows in layer_inputs(layer, x, self._with_bias, _MAX_ROWS):
                factor = rows.to(self._dtype)
                for strip in _strips(self._d):
                    self._gram[strip, : strip.stop].addmm_(factor[:, strip].T, factor[:, : strip.stop])
                self.rows += len(rows)

    def _add_lines(self, lines: Tensor) -> None:
        """Add ``[H, n, width]``, the n vectors of each padded image line."""
        kernel_lines = len(self._blocks)
        height = len(lines) - kernel_lines + 1
        for lag in range(kernel_lines):
            block = lines[:height].flatten(0, 1).T @ lines[lag : lag + height].flatten(0, 1)
            self._blocks[0, lag] += block
            for i in range(1, kernel_lines - lag):
                first, behind = i - 1, i - 1 + height
                block.addmm_(lines[first].T, lines[first + lag], alpha=-1)
                block.addmm_(lines[behind].T, lines[behind + lag])
                self._blocks[i, i + lag] += block
        if self._with_bias:
            for i in range(kernel_lines):
                self._sums[i] += lines[i : i + height].sum((0, 1))
        self.rows += height * lines.shape[1]

    def matrix(self) -> Tensor:
        """``C [d, d]``, symmetric."""
        lower = self.lower().tril()
        return lower + lower.tril(-1).T

    def lower(self) -> Tensor:
        """As :meth:`matrix`, but only the lower triangle is valid."""
        return self._from_blocks() if self._by_lines else self._gram

    def _from_blocks(self) -> Tensor:
        kh, channels, kw = self._kernel
        blocks = self._blocks.clone()
        for i in range(kh):
            for j in range(i):
                blocks[i, j] = blocks[j, i].T
        # From (kernel line, channel, kernel column) to the order of the weight, channel first.
        weights = self._d - self._with_bias
        inputs = blocks.view(kh, kh, channels, kw, channels, kw).permute(2, 0, 3, 4, 1, 5).reshape(weights, weights)
        if not self._with_bias:
            return inputs
        sums = self._sums.view(kh, channels, kw).transpose(0, 1).reshape(weights, 1)
        count = sums.new_full((1, 1), self.rows)
        return torch.cat([torch.cat([inputs, sums], 1), torch.cat([sums.T, count], 1)])


def by_lines(layer: nn.Module) -> bool:
    """Whether the covariance of a layer's inputs follows from products of image lines."""
    return isinstance(layer, nn.Conv2d) and layer.stride[0] == layer.dilation[0] == 1 and layer.kernel_size[0] > 1


def _image_lines(layer: nn.Conv2d, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Padded images as ``[H, n, channels * kw]``, some at a time."""
    images = F.pad(x.reshape(-1, *x.shape[-3:]), conv_padding(layer))
    extent = layer.dilation[1] * (layer.kernel_size[1] - 1) + 1
    windows = images.unfold(3, extent, layer.stride[1])[..., :: layer.dilation[1]].permute(2, 0, 3, 1, 4)
    at_once = max(1, _MAX_ROWS // (windows.shape[0] * windows.shape[2]))
    return [part.to(dtype).flatten(3).flatten(1, 2) for part in windows.split(at_once, 1)]


def _strips(d: int) -> list[slice]:
    """Four strips of equal height, the last with the remainder; a single strip if products would be small."""
    height = d if d < 64 else -(-d // 4)
    return [slice(start, min(start + height, d)) for start in range(0, d, height)]


def covariance_is_cheaper(layer: nn.Module, rows: int, d: int, columns: int) -> bool:
    """Whether :func:`draw_sketch` takes at most two thirds of the time of multiplying every input by Gaussian numbers.

    An estimate from the number of operations on a CPU, known before the data are seen. In float32 multiplications, with
    n rows and s columns: ``n s (d + 130)`` for the product and its ``n s`` normal numbers, against
    ``n d^2 w + s d (d + 130) + 9 d^3`` for the covariance (w = 5/4, or 2/kh by lines), the draw, and the square root in
    between. The limit is two thirds because the estimate is rough and the way row by row is simpler.

    Args:
        layer: the layer whose inputs are sketched.
        rows: n, of one client.
        d: length of an input.
        columns: s, of the sketch.
    """
    per_row = d * d * (2 / layer.kernel_size[0] if isinstance(layer, nn.Conv2d) and by_lines(layer) else _SYMMETRIC)
    directly = rows * columns * (d + _NORMAL)
    return 3 * (rows * per_row + columns * d * (d + _NORMAL) + _ROOT * d**3) < 2 * directly


@torch.no_grad()
def draw_sketch(
    covariance: Tensor, basis: Tensor | None, columns: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """A sketch ``A = X* G`` of inputs that are known by their covariance only (FOT eq 8, 9).

    Given the inputs ``X* [d, n]`` outside the basis, the columns of ``X* G`` with G iid N(0, 1) are independent and
    each is Gaussian with mean 0 and covariance ``C* = X* X*^T``. So are those of ``L Z`` with ``L L^T = C*`` and
    ``Z [d, s]`` iid N(0, 1): the same distribution, with ``d s`` numbers drawn instead of ``n s``.

    ``C* = (I - O O^T) C (I - O O^T)`` is taken here, in float64: energies outside the basis are right to about 1e-15
    of the whole, which is less than the rounding of float32 inputs projected one by one leaves (1e-13).

    L is the symmetric square root of C*. A triangular factor would be cheaper. But if an input depends on those before
    it, as behind a basis or with units that never fire, its columns would be determined by rounding, and the sketch
    would change at random with the number of processes. The root changes by at most sqrt(2) times as much as the
    inputs.

    Args:
        covariance: ``C [d, d]`` of the inputs, float64.
        basis: ``O [d, k]`` orthonormal, or None.
        columns: s.
        generator: draws float32 numbers on its device, all ``[d, s]`` at once.

    Returns:
        ``A [d, s]`` float32 and the float64 scalars ``||X||_F^2``, ``||X*||_F^2``; NaN if the covariance has any.
    """
    outside = covariance_outside(covariance, basis)
    root = _root(outside).float()
    gaussian = torch.randn(len(root), columns, generator=generator, device=generator.device).to(root.device)
    with torch.autocast(root.device.type, enabled=False):
        return root @ gaussian, covariance.trace(), outside.trace()


def covariance_outside(covariance: Tensor, basis: Tensor | None) -> Tensor:
    """``(I - O O^T) C (I - O O^T)``, the covariance ``[d, d]`` of inputs outside a basis ``[d, k]``, in float64."""
    if basis is None:
        return covariance
    if basis.shape[1] >= basis.shape[0]:
        return torch.zeros_like(covariance)
    columns = basis.double()
    with torch.autocast(covariance.device.type, enabled=False):
        product = covariance @ columns
        half = (product - columns @ (columns.T @ product) / 2) @ columns.T
    return covariance - half - half.T


def _root(covariance: Tensor) -> Tensor:
    """``C^(1/2) [d, d]``; NaN if the covariance has NaN or infinity, with which LAPACK may crash."""
    if not bool(torch.isfinite(covariance).all()):
        return torch.full_like(covariance, torch.nan)
    energies, directions = torch.linalg.eigh(covariance)
    with torch.autocast(covariance.device.type, enabled=False):
        return directions * energies.clamp(min=0).sqrt() @ directions.T
