"""Exemplars: samples that clients keep of the classes they have learned, chosen by herding (iCaRL, GLFC)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.engines.cohort import Cohort
from cfl.federation.replay_memory import chosen
from cfl.methods.components.herding import herd
from cfl.randomness.generators import seed_for
from cfl.runtime.moving import moved

Table = dict[str, Tensor]
"""``place``, ``output`` and ``rank`` ``[S]`` int64 of a client's exemplars: the sample's index, its class, and the
number of samples of the class chosen before it; place -1 in free slots. Stacked for a cohort ``[K, S]``."""


def no_exemplars(size: int) -> Table:
    """The table of a client with ``size`` free slots."""
    free = torch.full((size,), -1, dtype=torch.int64)
    return {"place": free, "output": free.clone(), "rank": torch.zeros(size, dtype=torch.int64)}


def with_classes(before: Table, each: int, features: Tensor, labels: Tensor, places: Tensor) -> Table:
    """A client's exemplars after it has learned classes: iCaRL's Algorithms 4 and 5.

    Args:
        before: the client's table of exemplars; other entries of it are ignored.
        each: exemplars of every class; of earlier classes the first ones are kept.
        features: ``[n, d]`` of the samples to choose from.
        labels: ``[n]`` int64, their classes; exemplars of these classes are chosen anew.
        places: ``[n]`` int64, their indices.

    Returns:
        The new table. If there are more exemplars than slots, those of the latest classes are kept.
    """
    found = labels.unique().tolist()
    stays = (before["place"] >= 0) & (before["rank"] < each) & ~torch.isin(before["output"], torch.tensor(found))
    parts = {name: [before[name][stays]] for name in ("place", "output", "rank")}
    for output in found:
        rows = (labels == output).nonzero().squeeze(1)
        picked = rows[herd(features[rows], each)].cpu()
        parts["place"].append(places[picked])
        parts["output"].append(torch.full((len(picked),), output))
        parts["rank"].append(torch.arange(len(picked)))
    table = no_exemplars(size := len(before["place"]))
    for name, values in parts.items():
        held = torch.cat(values)[-size:]
        table[name][: len(held)] = held
    return table


class Replayed(NamedTuple):
    """Exemplars that join a local step, as if they were in the clients' training sets.

    Attributes:
        places: ``[K, M]`` int64 indices on the CPU; arbitrary valid ones where a client takes fewer than M.
        mask: ``[K, M]`` bool, False for these arbitrary indices.
        mask_on_cpu: ``mask`` on the CPU.
        weights: ``[K, M]`` float64, of the exemplars' losses. With a number of exemplars per step, the loss is the mean
            over the step's own samples and exemplars together. With their proportion it is the mean over the step's own
            samples times n/(n + m) plus the mean over its exemplars times m/(n + m), with n training samples and m
            exemplars of the client: over an epoch, every sample of both counts the same.
        own_factor: ``[K]`` float64, factor of the mean over own samples in that loss.
    """

    places: Tensor
    mask: Tensor
    mask_on_cpu: Tensor
    weights: Tensor
    own_factor: Tensor


def replayed(
    table: Table, cohort: Cohort, batch: CohortBatch, batch_size: int | None, seed: int, purpose: str
) -> Replayed | None:
    """The exemplars that join a step, see :func:`memory_share`; None if there are none.

    Args:
        table: the cohort's, ``[K, S]``.
        cohort: its clients.
        batch: the step.
        batch_size: exemplars per client; None for their proportion.
        seed: the run's.
        purpose: name of the draw.
    """
    keys = [seed_for(seed, purpose, client, cohort.round, batch.step) for client in cohort.clients]
    drawn = memory_share(table["place"] >= 0, cohort.sizes, batch.mask_on_cpu, batch_size, keys)
    if drawn is None:
        return None
    slots, taken = drawn
    places, device = table["place"].gather(1, slots), batch.index.device
    filled, mask = torch.where(taken, places, places[taken][0]), moved(taken, device)
    joined = mask.sum(1)
    if batch_size is None:  # rounded up to whole exemplars, a step may have more than their proportion
        own, added = moved(torch.tensor(cohort.sizes), device), moved((table["place"] >= 0).sum(1), device)
    else:
        own, added = batch.mask.sum(1), joined
    total = (own + added).clamp(min=1)
    weights = mask.double() / joined.clamp(min=1).unsqueeze(1) * (added.double() / total).unsqueeze(1)
    return Replayed(filled, mask, taken, weights, own.double() / total)


def memory_share(
    held: Tensor, sizes: Sequence[int], mask: Tensor, batch_size: int | None, keys: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The slots of K clients' memories that join a step; None if there are none.

    Args:
        held: ``[K, S]`` bool, slots that hold a sample.
        sizes: the clients' numbers of training samples.
        mask: ``[K, B]`` bool on the CPU, the step's own samples; a client without any takes nothing.
        batch_size: samples per client and step, at most what it holds. None takes the same share of the memory as the
            step takes of the client's training samples, rounded up.
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
