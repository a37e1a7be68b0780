"""Methods that train on own and remembered samples with another loss than cross-entropy."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cfl.data.samples import Samples
from cfl.methods.base import Method


class OwnLoss(Method, ABC):
    """Takes the cross-entropy off a step's own samples and off those that it adds; :meth:`sample_loss` replaces it."""

    replaces_own_loss = True

    @abstractmethod
    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """The loss of :meth:`ours`."""

    def sample_weights(self, weights: Tensor, logits: Tensor, samples: Samples) -> Tensor:
        """No cross-entropy of the step's own samples and of the memory's."""
        return torch.where(self.ours(samples), torch.zeros_like(weights), weights)
