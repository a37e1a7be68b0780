"""Losses of an AC-GAN, arranged so that one backward pass gives critic and generator the gradients of their losses."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.models.acgan import ACGAN
from cfl.models.batchnorm import batch_mask
from cfl.models.functional import call_with

_NEVER = -1e9
"""Logit of an output that is left out. Finite, because differences of log-probabilities are computed from it."""
_AT_ONCE = 512
"""Images generated together, which bounds memory."""


def acgan_loss(
    network: ACGAN,
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    noise: Tensor,
    fake_weights: Tensor,
    allowed: Tensor | None = None,
    drawn: Tensor | None = None,
) -> Tensor:
    """Critic's and generator's losses ``[]`` on samples, with one generated image of the same class for each.

    With the critic's real-or-not logit r and class probabilities p, sample ``x_i`` of class ``y_i`` and generated
    ``x'_i = G(z_i, y_i)``::

        critic:     sum_i w_i (-log s(r(x_i)) - log p_y(x_i)) + v_i (-log(1 - s(r(x'_i))) - log p_y(x'_i))
        generator:  sum_i v_i (-log s(r(x'_i)) - log p_y(x'_i))

    where s is the logistic function. The critic's loss has no gradient with respect to the generator's parameters, and
    the generator's loss none with respect to the critic's. The gradient of the sum is therefore, for each of the two,
    the gradient of its own loss.

    Args:
        network: holds the parameters.
        x: ``[N, C, H, W]``.
        y: ``[N]`` int64.
        weights: ``[N]`` w.
        noise: ``[N, Z]`` z.
        fake_weights: ``[N]`` v.
        allowed: ``[N, O]`` bool, the outputs that take part in each sample's p, or None for all.
        drawn: ``[N]`` bool, the samples for which noise was drawn. BatchNorm sees generated images of these alone. None
            for all.
    """

    def of_drawn() -> AbstractContextManager[None]:
        return nullcontext() if drawn is None else batch_mask(network, drawn)

    with of_drawn():
        fake = network.generate(noise, y)
    real = network.judge(x)
    with of_drawn():
        seen = network.judge(fake.detach())
        judged = _frozen_judge(network, fake)
    critic = weights * (F.softplus(-real[0]) + class_losses(real[1], y, allowed))
    critic = critic + fake_weights * (F.softplus(seen[0]) + class_losses(seen[1], y, allowed))
    generator = fake_weights * (F.softplus(-judged[0]) + class_losses(judged[1], y, allowed))
    return (critic + generator).sum()


def divergences(target: Tensor, found: Tensor, allowed: Tensor | None = None) -> Tensor:
    """``[N]`` ``KL(softmax(target) || softmax(found))``; both ``[N, O]`` logits are differentiated."""
    log_p, log_q = (F.log_softmax(_masked(logits, allowed), -1) for logits in (target, found))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def class_losses(logits: Tensor, y: Tensor, allowed: Tensor | None = None) -> Tensor:
    """``[N]`` ``-log softmax(logits)_y``."""
    return F.cross_entropy(_masked(logits, allowed), y, reduction="none")


def _masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, _NEVER)


def _frozen_judge(network: ACGAN, x: Tensor) -> tuple[Tensor, Tensor]:
    """The critic's outputs, differentiable with respect to the images only."""
    tensors = {name: tensor.detach() for name, tensor in network.named_parameters()}
    return call_with(network, tensors, network.judge, x)


@torch.no_grad()
def generated_images(network: ACGAN, parameters: Mapping[str, Tensor], noise: Tensor, y: Tensor) -> Tensor:
    """Images of a given generator, ``[..., C, H, W]``, computed in batches.

    Args:
        network: the architecture; its own generator is not used.
        parameters: parameters and buffers of the generator, under the network's names.
        noise: ``[..., Z]`` standard normal.
        y: ``[...]`` int64 outputs.
    """
    parts = zip(noise.flatten(0, -2).split(_AT_ONCE), y.flatten().split(_AT_ONCE), strict=True)
    dtype = next(iter(parameters.values())).dtype
    with network.generating():
        made = [call_with(network, parameters, network.generate, z.to(dtype), c) for z, c in parts]
    return torch.cat(made).unflatten(0, y.shape)
