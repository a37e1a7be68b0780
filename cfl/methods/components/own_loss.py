"""Base class of methods that replace the cross-entropy by a loss of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cfl.data.samples import Samples
from cfl.methods.base import Method


class OwnLoss(Method, ABC):
    """Replaces the cross-entropy of a step's own samples, and of those that it adds, by :meth:`sample_loss`."""

    replaces_own_loss = True

    @abstractmethod
    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """The loss ``[]`` of a client's samples of :meth:`ours`: its own and those that the method adds."""

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """Weights with 0 for the step's own samples and for those that the method adds."""
        return torch.where(self.ours(samples), torch.zeros_like(weights), weights)
