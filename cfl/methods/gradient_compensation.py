"""Gradient compensation of GLFC (Dong et al., CVPR 2022) over a replay memory, in FOT's task-incremental form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.data.samples import Samples
from cfl.methods.components.binary_cross_entropy import mean_bce
from cfl.methods.components.weighted_sum import weighted_sum
from cfl.methods.er import ER, Weighting
from cfl.runtime.option_checks import check_choices


class GradientCompensation(ER):
    """Replays earlier samples, with the gradients of old and new samples scaled to the same mean (GLFC's first part).

    With ``g_i = |p_i(y_i) - 1|``, the size of the loss's gradient at the true output (eq 3), every sample's loss is
    multiplied by ``g_i`` over the mean of ``g`` in its group (eq 4, 5): the memory's samples are one group, the step's
    own the other. Without memory samples the factor is 1. The factors are not differentiated.

    FOT (Appendix F.2) leaves out GLFC's relation distillation, which has no meaning if every task has its own outputs,
    and the proxy server. It does not say which loss it uses, nor which groups it forms with a head per task. We take
    the memory and the current task as the two groups. Its memory sizes are those of ER. Samples are chosen uniformly,
    as in ER; GLFC uses herding.

    Sends: nothing beyond the model. Storage per client, extra compute, optimizers: those of ER. Scenarios: task-,
    class- and domain-incremental.

    Args:
        loss: ``ce``: cross-entropy with softmax probabilities; ``bce``: GLFC's binary cross-entropy with logits, mean
            over the outputs of the sample's task, and sigmoid probabilities.
        weighting: see ER; the default is ``appended`` because GLFC appends the memory to the training set.
        options: the others of ER. A ``weight`` of 0 is federated averaging with ``loss: ce``.

    Raises:
        ConfigError: ``loss`` is another one; otherwise as :class:`ER`.
    """

    _draws = "glfc"

    def __init__(self, loss: Literal["ce", "bce"] = "ce", *, weighting: Weighting = "appended", **options: Any) -> None:
        check_choices(self.key, ("ce", "bce"), loss=loss)
        super().__init__(weighting=weighting, **options)
        self.loss = loss
        self.reweighs_added_only = loss == "ce"
        self.replaces_own_loss = loss == "bce"

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """The compensated weights; 0 with ``bce``, whose loss :meth:`sample_loss` computes."""
        if self.loss == "bce":
            return torch.where(self.ours(samples), torch.zeros_like(weights), weights)
        return weights * self._compensation(logits, samples)

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """The compensated binary cross-entropy with ``bce``, else 0."""
        if self.loss == "ce":
            return logits.new_zeros(())
        target = F.one_hot(samples.y, logits.shape[-1]).to(logits.dtype)
        losses = mean_bce(logits, target, samples.allowed)
        weights = samples.weights.to(losses.dtype) * self._compensation(logits, samples)
        return weighted_sum(losses, weights, samples.mask & self.ours(samples))

    def _compensation(self, logits: Tensor, samples: Samples) -> Tensor:
        """``[N]`` g over its group's mean; 1 for other methods' samples, and for all while the memory is empty."""
        logits = logits.detach()
        if self.loss == "bce":
            p = logits.sigmoid()
        else:
            p = (logits if samples.allowed is None else logits.masked_fill(~samples.allowed, -torch.inf)).softmax(-1)
        g = 1.0 - p.gather(-1, samples.y.unsqueeze(-1)).squeeze(-1)
        remembered = samples.mask & (samples.source == self.source)
        factors = over_group_means(g, (samples.mask & (samples.source == 0), remembered))
        return torch.where(remembered.any(), factors, torch.ones_like(g))


def over_group_means(g: Tensor, groups: Iterable[Tensor]) -> Tensor:
    """``[N]``: each ``g_i`` divided by the mean of g in its group (Dong et al., 2022); 1 outside the groups.

    Args:
        g: ``[N]``, at least 0.
        groups: each ``[N]`` bool, without common members.
    """
    factors = torch.ones_like(g)
    for group in groups:
        mean = torch.where(group, g, torch.zeros_like(g)).sum() / group.sum().clamp(min=1)
        factors = torch.where(group, g / mean.clamp(min=torch.finfo(g.dtype).tiny), factors)
    return factors
