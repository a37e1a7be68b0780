"""BatchNorm for padded batches: statistics over the real samples only.

Clients trained side by side need batches of one size, so small batches are padded. With ordinary BatchNorm the padding
would affect every output, gradient and running statistic. With these layers it does not, and a padded batch trains
exactly as the unpadded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

_Module = TypeVar("_Module", bound=nn.Module)


class _MaskedBatchNorm(_BatchNorm):
    """Base class of the masked layers; see :class:`MaskedBatchNorm2d`."""

    # On the class, so that a layer converted in place has it too.
    _mask: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        tracks = self.training and self.track_running_stats and self.running_mean is not None
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        # Torch's layer fails in two cases that must work here. The cumulative average (momentum None) reads a counter
        # as a Python number, which vmap cannot. And it refuses a batch of one value, so that a client's last
        # batch would fail when unpadded and work when padded.
        refused = (tracks and self.momentum is None) or len(input) * math.prod(input.shape[2:]) == 1
        if self._mask is None and not refused:
            return super().forward(input)
        mask = torch.ones(len(input), dtype=torch.bool, device=input.device) if self._mask is None else self._mask
        if len(mask) != len(input):
            raise ValueError(f"a batch mask of {len(mask)} samples does not fit a batch of {len(input)}")
        output, mean, variance, values = self._normalise(input, mask)
        if tracks:
            with torch.no_grad():
                self._track(mean.detach(), variance.detach(), values)
        return output

    def _normalise(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output ``[B, C, ...]``, mean and biased variance ``[C]``, number of values per channel ``[]``."""
        per_channel = (1, -1, *[1] * (x.ndim - 2))
        reduced = [0, *range(2, x.ndim)]
        padding = ~mask.reshape(-1, *[1] * (x.ndim - 1))
        # Half precision is too coarse for sums over a batch; torch's layer computes these in float32 as well.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        values = mask.sum() * math.prod(x.shape[2:])
        divisor = values.clamp(min=1).to(wide.dtype)

        mean = wide.masked_fill(padding, 0).sum(reduced) / divisor
        # Filled again after the subtraction, not multiplied by 0: padding may be NaN, and NaN * 0 is NaN.
        centred = (wide - mean.view(per_channel)).masked_fill(padding, 0)
        variance = centred.square().sum(reduced) / divisor
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        output = centred * scale.view(per_channel)
        if self.bias is not None:
            output = output + self.bias.view(per_channel)
        return output.to(x.dtype), mean, variance, values

    def _track(self, mean: Tensor, variance: Tensor, values: Tensor) -> None:
        """Update the running statistics; the running variance uses the unbiased estimate, as torch's does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        known = values > 1  # one value has no unbiased variance, and no value has no mean
        self.num_batches_tracked.add_(known.long())
        # Counts become floating point in the layer's own precision; integer division would give float32.
        batches = self.num_batches_tracked.clamp(min=1).to(variance.dtype)
        share = 1 / batches if self.momentum is None else self.momentum
        unbiased = variance * (values.to(variance.dtype) / (values - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            moved = (1 - share) * running + share * new
            running.copy_(torch.where(known, moved, running))


class MaskedBatchNorm1d(_MaskedBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that ignores padding, for ``[B, C]`` or ``[B, C, L]``; see :class:`MaskedBatchNorm2d`."""


class MaskedBatchNorm2d(_MaskedBatchNorm, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` for ``[B, C, H, W]`` whose batch statistics leave out padding (Ioffe & Szegedy, 2015).

    Arguments, parameters, buffers and state dict are those of ``nn.BatchNorm2d``. Inside :func:`batch_mask` the
    statistics of a batch, in training and, with ``track_running_stats=False``, in evaluation, are taken over the
    samples whose mask is True. Their outputs, all gradients, and the running statistics are then those of the batch
    without the padding, for any values of the padding, even NaN, as long as the loss leaves out the padded rows. Padded
    rows have the layer's bias as output and pass no gradient to their input. Outside :func:`batch_mask` the layer
    behaves as ``nn.BatchNorm2d``, except for batches of one value.

    A batch with fewer than two real values per channel, masked or not, does not change the running statistics, since
    one value has no variance. Its output is the layer's bias, where torch's layer would raise an error. Works under
    ``torch.func.vmap`` with stacked parameters and buffers, with ``momentum=None`` too.
    """


@contextmanager
def batch_mask(network: nn.Module, mask: Tensor | None) -> Iterator[None]:
    """Within the context, the masked BatchNorm layers of ``network`` see only samples whose mask is True.

    Enter it around the forward pass, inside the function given to ``torch.func.vmap`` if the mask is a mapped argument.

    Args:
        network: holds the layers; other layers are left alone.
        mask: ``[B]`` bool, False for padding; None for no padding.

    Raises:
        ValueError: the mask is not a bool vector; in the forward pass, its length is not that of the batch.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.ndim != 1):
        raise ValueError(f"a batch mask is bool [B], got {mask.dtype} {list(mask.shape)}")
    layers = [module for module in network.modules() if isinstance(module, _MaskedBatchNorm)]
    before = [layer._mask for layer in layers]
    try:
        for layer in layers:
            layer._mask = mask
        yield
    finally:
        # Restored after errors as well, because a mask must not outlive the vmap that made it.
        for layer, mask_before in zip(layers, before, strict=True):
            layer._mask = mask_before


_MASKED: dict[type[nn.Module], type[_MaskedBatchNorm]] = {
    nn.BatchNorm1d: MaskedBatchNorm1d,
    nn.BatchNorm2d: MaskedBatchNorm2d,
}


def convert_batchnorm(module: _Module) -> _Module:
    """Make every ``nn.BatchNorm1d`` and ``nn.BatchNorm2d`` in ``module`` a masked one, in place; returns ``module``.

    Only the class of the layer objects changes, as in torch's lazy layers, so that names, weights, buffers, hooks,
    layers used in several places and training flags are kept. Subclasses of the two, whose forward pass may differ, are
    not changed and are reported by :func:`unmaskable_layers`.
    """
    for layer in module.modules():
        if type(layer) in _MASKED:
            layer.__class__ = _MASKED[type(layer)]
    return module


def unmaskable_layers(module: nn.Module) -> list[str]:
    """Dotted names (as in ``named_modules``) of the layers that mix samples of a batch and cannot leave out padding.

    These are BatchNorm layers of any other kind (3-D, synchronised, lazy, a user's subclass, or simply not converted),
    and InstanceNorm with running statistics, which are averages over the batch. Batch statistics that a network
    computes without such a layer cannot be detected.
    """
    return [
        name
        for name, layer in module.named_modules()
        if (isinstance(layer, _BatchNorm) and not isinstance(layer, _MaskedBatchNorm))
        or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)
    ]
