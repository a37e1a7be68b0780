"""All clients of a cohort in one stacked forward and backward pass, by torch.func.vmap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from cfl.cohort import Cohort
from cfl.data.cohorts import CohortBatch
from cfl.engines.base import Compile, Engine, StepContext, dropout_keys
from cfl.models.batchnorm import batch_mask
from cfl.models.dropout import DropoutMasks, dropout_masks


class VmapEngine(Engine):
    """Any network, any device. A single client takes the ordinary path without vmap.

    Args:
        network: the architecture; its own parameters are not touched.
        input_shape: ``(C, H, W)``.
        compile: torch.compile mode, or None.
    """

    kind = "vmap"

    def __init__(self, network: nn.Module, input_shape: tuple[int, int, int], compile: Compile | None = None) -> None:
        self.network = network
        self.masks = DropoutMasks(network, input_shape)
        self._has_batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
        self._together: Any = self._all_losses
        if compile is not None:
            self._together = torch.compile(self._all_losses, mode=None if compile == "default" else compile)

    def losses(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> Tensor:
        """As :meth:`Engine.losses`, with a graph."""
        x, y = batch.x, batch.y
        mask = batch.mask if batch.padded else None
        dropped = {}
        if self.masks:
            keys = dropout_keys(context.seed, cohort, batch, x.device)
            dropped = self.masks.draw(keys, x.shape[1], next(iter(cohort.parameters.values())).dtype)
        outputs = cohort.outputs_in_loss(batch.task)
        if len(cohort.clients) == 1:
            return self._loss(
                {n: p.view(p.shape[1:]) for n, p in cohort.parameters.items()},
                {n: b[0] for n, b in cohort.buffers.items()},
                {n: m[0] for n, m in dropped.items()},
                x[0],
                y[0],
                None if mask is None else mask[0],
                outputs,
            ).view(1)
        losses: Tensor = self._together(cohort.parameters, cohort.buffers, dropped, x, y, mask, outputs)
        return losses

    def backward(self, total: Tensor, cohort: Cohort) -> None:
        """Autograd."""
        total.backward()

    def _all_losses(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dropped: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
    ) -> Tensor:
        axes = (0, 0, 0, 0, 0, None if mask is None else 0, None)
        # Randomness of the network's own, beside counted dropout, is drawn for each client by itself.
        mapped = vmap(self._loss, in_dims=axes, randomness="different")
        losses: Tensor = mapped(parameters, buffers, dropped, x, y, mask, outputs)
        return losses

    def _loss(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        dropped: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        outputs: Tensor | None,
    ) -> Tensor:
        with dropout_masks(self.network, dropped), batch_mask(self.network, mask if self._has_batchnorm else None):
            logits = functional_call(self.network, {**parameters, **buffers}, (x,))
        if outputs is not None:
            logits = logits.masked_fill(~outputs, -torch.inf)
        if mask is None:
            return F.cross_entropy(logits, y)
        losses = F.cross_entropy(logits, y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)
