"""Trains a model at the server on generated images."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.methods.components.gan.losses import acgan_loss
from cfl.models.acgan import ACGAN
from cfl.models.dropout import dropout_masks
from cfl.models.evaluation import training_mode
from cfl.models.functional import call_with


class MadeBatch(NamedTuple):
    """The batch of one step; see :func:`cfl.methods.components.gan.losses.acgan_loss`.

    Attributes:
        x: ``[N, C, H, W]``.
        y: ``[N]`` int64.
        weights: ``[N]``, of the images and of the images generated for comparison with them.
        noise: ``[N, Z]``.
        allowed: ``[N, O]`` bool or None.
        dropped: dropout layer name -> ``[N, ...]``, see :class:`cfl.models.dropout.DropoutMasks`.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    noise: Tensor
    allowed: Tensor | None
    dropped: dict[str, Tensor]


def consolidated(
    network: ACGAN, tensors: Mapping[str, Tensor], names: Collection[str], batches: Iterable[MadeBatch], lr: float
) -> dict[str, Tensor]:
    """Train some parameters by AC-GAN steps of Adam with betas 0.5 and 0.999, one on each batch.

    Args:
        network: the architecture; its own parameters do not change.
        tensors: parameters and buffers by name, to start from.
        names: names of the parameters to train; all others stay unchanged.
        batches: the batches, one per step.
        lr: learning rate.
    """
    others = {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in names}
    trained = {name: tensors[name].detach().clone().requires_grad_() for name in names}
    # Fused Adam reads the weights once per step: on CPUs four times as fast as separate operations.
    optimizer = torch.optim.Adam(trained.values(), lr=lr, betas=(0.5, 0.999), fused=True)
    with training_mode(network):
        for batch in batches:
            with torch.enable_grad(), dropout_masks(network, batch.dropped):
                loss = call_with(network, {**trained, **others}, _loss, network, batch)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in trained.items()}


def _loss(network: ACGAN, batch: MadeBatch) -> Tensor:
    return acgan_loss(network, batch.x, batch.y, batch.weights, batch.noise, batch.weights, batch.allowed)
