"""What the simulators share: the loop's network with its initial weights, the clients' samples and the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cfl.models
from benchmarks.works import Work


def network_of(work: Work, seed: int = 0) -> nn.Module:
    """Return the work's network with the initial weights of :class:`benchmarks.loop.Loop`."""
    torch.manual_seed(seed)
    made: nn.Module = getattr(cfl.models, work.network)(work.shape, work.outputs, **work.options)
    return made


def shares_of(work: Work, seed: int = 0) -> Tensor:
    """Return ``[clients, samples]``, each client's samples."""
    return torch.randperm(work.task_size, generator=torch.Generator().manual_seed(seed)).view(
        work.clients, work.samples
    )


def loss_of(work: Work, logits: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of a batch, over the outputs of the work's first task."""
    return cross_entropy(logits[:, : work.classes] if work.tasks > 1 else logits, y)
