"""The fewest FLOPs with which a work can be computed."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import cfl.models
from benchmarks.works import Work


def step_flops(work: Work, batch_size: int) -> int:
    """FLOPs of matrix products and convolutions in one forward and backward pass, counted while it runs.

    Images need no gradient, so none is counted for the first layer's input. The network is built with the task's own
    outputs, because those of other tasks are masked and need not be computed.

    Args:
        work: gives network and images.
        batch_size: samples in the pass.
    """
    network = getattr(cfl.models, work.network)(work.shape, work.classes, **work.options)
    x = torch.zeros(batch_size, *work.shape)
    y = torch.zeros(batch_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(network(x), y).backward()
    return counter.get_total_flops()


def round_flops(work: Work) -> int:
    """FLOPs of a round: every sample of every sampled client once."""
    whole, rest = divmod(work.samples, work.batch_size)
    steps = whole * step_flops(work, work.batch_size) + (step_flops(work, rest) if rest else 0)
    return work.sampled * steps
