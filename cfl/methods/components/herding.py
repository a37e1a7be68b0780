"""Herding (Welling, 2009), by which iCaRL chooses exemplars: few samples whose mean is close to the mean of all."""

from __future__ import annotations

import torch
from torch import Tensor

_EQUAL = 1e-12
"""Squared distances that differ by no more than this share of the longest feature's square differ by rounding."""


def herd(features: Tensor, count: int) -> Tensor:
    """Choose samples one after another, each so that the mean of the chosen comes closest to the mean of all.

    ``p_k = argmin_x || mu - (phi(x) + sum_{j < k} phi(p_j)) / k ||`` over the samples not chosen yet (Rebuffi et al.,
    CVPR 2017, Algorithm 4). The first m samples of a longer choice are the choice of m samples.

    Args:
        features: ``[n, d]``, finite.
        count: number of samples to choose; all n, in this order, if there are fewer.

    Returns:
        ``[min(count, n)]`` int64 rows. Of equally good samples, such as the only two of a class, the first is chosen.
    """
    features = features.double()
    mean, total = features.mean(0), torch.zeros_like(features[0])
    free = torch.ones(len(features), dtype=torch.bool, device=features.device)
    equal = _EQUAL * float(features.square().sum(1).max()) if len(features) else 0.0
    chosen = []
    for k in range(1, min(count, len(features)) + 1):
        distances = (mean - (features + total) / k).square().sum(1)
        distances = distances.masked_fill(~free, torch.inf)
        row = int((distances <= distances.min() + equal).int().argmax())
        chosen.append(row)
        free[row] = False
        total = total + features[row]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)
