"""How much of a client's memory takes part in a local step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cfl.federation.replay_memory import chosen


def memory_share(
    held: Tensor, sizes: Sequence[int], mask: Tensor, batch_size: int | None, keys: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Which slots of K clients' memories join a step; None for no sample at all.

    Args:
        held: ``[K, S]`` bool, slots that hold a sample.
        sizes: the clients' numbers of training samples.
        mask: ``[K, B]`` bool on the CPU, the step's own samples; a client without any takes nothing.
        batch_size: samples per client and step, at most what it holds; None for as large a share of the memory as the
            step has of the client's training samples, so that an epoch goes through memory and samples alike.
        keys: K 63-bit integers, one draw each.

    Returns:
        ``[K, M]`` int64 slots and ``[K, M]`` bool, False where a client takes fewer than M.
    """
    wanted = torch.full((len(held),), batch_size or 0)
    if batch_size is None:
        samples = torch.tensor(sizes).clamp(min=1)
        wanted = (held.sum(1) * mask.sum(1) + samples - 1) // samples  # rounded up, in integers
    wanted = wanted.minimum(held.sum(1)) * mask.any(1)
    if not int(wanted.max()):
        return None
    slots, taken = chosen(held, int(wanted.max()), torch.tensor(keys, dtype=torch.int64))
    return slots, taken & (torch.arange(taken.shape[1]) < wanted.unsqueeze(1))
