"""Exemplars: samples that clients keep of the classes they have learned, chosen by herding (iCaRL, GLFC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples
from cfl.engines.cohort import Cohort
from cfl.federation.replay_memory import chosen
from cfl.methods.base import Method
from cfl.methods.components.herding import herd
from cfl.models.base import Network
from cfl.models.features import unit_features
from cfl.randomness.generators import seed_for
from cfl.runtime.moving import moved

Table = dict[str, Tensor]
"""``place``, ``output`` and ``rank`` ``[S]`` int64 of a client's exemplars: the sample's index, its class, and the
number of samples of the class chosen before it; place -1 in free slots. Stacked for a cohort ``[K, S]``."""


def no_exemplars(size: int) -> Table:
    """The table of a client with ``size`` free slots."""
    free = torch.full((size,), -1, dtype=torch.int64)
    return {"place": free, "output": free.clone(), "rank": torch.zeros(size, dtype=torch.int64)}


def features_and_labels(
    network: Network, model: Mapping[str, Tensor], batches: Iterable[tuple[Tensor, Tensor]], mirrored: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`cfl.models.features.unit_features` ``[n, d]`` and labels ``[n]`` of the samples to choose from."""
    parts = [(unit_features(network, model, x, mirrored), y) for x, y in batches]
    return torch.cat([features for features, _ in parts]), torch.cat([labels for _, labels in parts])


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


def with_exemplars(
    method: Method,
    table: Table,
    cohort: Cohort,
    batch: CohortBatch,
    batch_size: int | None,
    extras: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]],
) -> CohortBatch:
    """A step with exemplars of its clients, as if they were in their training sets; see :func:`memory_share`.

    With ``batch_size`` the loss is the mean over the step's own samples and exemplars together. With their proportion
    it is the mean over the step's own samples times n/(n + m) plus the mean over its exemplars times m/(n + m), with n
    training samples and m exemplars of the client: over an epoch, every sample of both counts the same.

    Args:
        method: adds the exemplars; its name keys the draw.
        table: the cohort's, ``[K, S]``.
        cohort: its clients.
        batch: the step; returned as it is if there are no exemplars.
        batch_size: exemplars per client; None for their proportion.
        extras: makes the extra tensors of ``[K, M]`` exemplars, given inputs, outputs and, on the CPU, a mask that is
            False where a client takes fewer than M.
    """
    context, device = method.context, batch.index.device
    keys = [seed_for(context.seed, f"{method.name} draw", c, cohort.round, batch.step) for c in cohort.clients]
    drawn = memory_share(table["place"] >= 0, cohort.sizes, batch.mask_on_cpu, batch_size, keys)
    if drawn is None:
        return batch
    slots, taken = drawn
    places, mask = table["place"].gather(1, slots), moved(taken, device)
    places = torch.where(taken, places, places[taken][0])
    joined = mask.sum(1)
    if batch_size is None:  # rounded up to whole exemplars, a step may have more than their proportion
        own, added = moved(torch.tensor(cohort.sizes), device), moved((table["place"] >= 0).sum(1), device)
    else:
        own, added = batch.mask.sum(1), joined
    total = (own + added).clamp(min=1)
    weights = mask.double() / joined.clamp(min=1).unsqueeze(1) * (added.double() / total).unsqueeze(1)
    x, y, tasks = context.samples_at(places, (cohort.round, batch.step), device)
    return batch.with_added(
        ExtraSamples(x, y, tasks, mask, weights, method.source, extras(x, y, taken), own_factor=own.double() / total)
    )


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
