"""The vectors that a layer multiplies its weight with, as rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def layer_dim(layer: nn.Module, with_bias: bool = False) -> int:
    """Length ``d`` of a layer's input vectors: columns of its weight viewed as ``[o, d]``, plus 1 for the bias.

    Args:
        layer: as :func:`cfl.methods.components.layer_inputs.weighted_layers.choose_layers` chooses it.
        with_bias: count the bias too, as the weight of one more input that is always 1.
    """
    return layer.get_parameter("weight")[0].numel() + with_bias


def layer_inputs(layer: nn.Module, x: Tensor, with_bias: bool = False, max_rows: int = 2048) -> Iterator[Tensor]:
    """The vectors a layer multiplies its weight with, as rows ``[n, d]``, in pieces of at most ``max_rows``.

    ``rows @ weight.view(o, -1).T`` is the layer's output without bias, one row per sample (Linear) or per sample and
    output position in row-major order (Conv2d). With ``with_bias`` a column of ones is appended, so that
    ``rows @ cat([weight.view(o, -1), bias[:, None]], 1).T`` is the whole output: a change of weight and bias that is
    orthogonal to these rows changes no output. (If a convolution is padded so widely that a patch is all padding, its
    bias is then frozen, since the output for this patch is the bias.)

    A convolution's rows hold each activation ``kh * kw`` times over, so they are yielded in pieces. How they are cut
    changes neither their values nor their order.

    Args:
        layer: see :func:`layer_dim`.
        x: the layer's input: ``[..., in_features]`` for Linear, ``[..., C, H, W]`` for Conv2d.
        with_bias: append the column of ones.
        max_rows: largest ``n`` of a piece, at least 1.
    """
    if isinstance(layer, nn.Conv2d):
        pieces = _patches(layer, x.reshape(-1, *x.shape[-3:]), max_rows)
    else:
        pieces = iter(x.reshape(-1, x.shape[-1]).split(max_rows))
    return (torch.cat([p, p.new_ones(len(p), 1)], 1) for p in pieces) if with_bias else pieces


def _patches(layer: nn.Conv2d, x: Tensor, max_rows: int) -> Iterator[Tensor]:
    """Patches of ``x`` [B, C, H, W] as rows ``[n, C * kh * kw]``, channel-major like the weight."""
    windows = F.pad(x, conv_padding(layer))
    for axis in (0, 1):
        kernel, dilation = layer.kernel_size[axis], layer.dilation[axis]
        extent = dilation * (kernel - 1) + 1
        windows = windows.unfold(axis + 2, extent, layer.stride[axis])[..., ::dilation]
    windows = windows.permute(0, 2, 3, 1, 4, 5)  # a view, [B, H', W', C, kh, kw]: nothing is copied so far
    images, height, width = windows.shape[:3]
    # Blocks of whole images; of whole lines if one image is too much; of parts of a line if one line is.
    step_b = max(1, max_rows // (height * width))
    step_h = max(1, min(height, max_rows // width))
    step_w = min(width, max_rows)
    for b in range(0, images, step_b):
        for h in range(0, height, step_h):
            for w in range(0, width, step_w):
                yield windows[b : b + step_b, h : h + step_h, w : w + step_w].flatten(0, 2).flatten(1)


def conv_padding(layer: nn.Conv2d) -> list[int]:
    """Zeros on the (left, right, top, bottom) of a convolution's input."""
    sides = []
    for axis in (1, 0):
        if isinstance(layer.padding, str):
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1) if layer.padding == "same" else 0
            sides += [total // 2, total - total // 2]
        else:
            sides += [layer.padding[axis]] * 2
    return sides
