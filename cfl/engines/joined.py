"""Own and added samples of a cohort's step, joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.data.samples import Samples
from cfl.engines.base import Step
from cfl.models.dropout import DropoutMasks

Given = tuple[Tensor, Samples, dict[str, Tensor]]
"""Inputs, all other data and dropout masks of samples."""


@dataclass(frozen=True)
class Joined:
    """All samples of a cohort's step, ``[k, N, ...]``; :meth:`of` makes it.

    Attributes:
        step: the step.
        masks: draws dropout masks.
        x: inputs.
        samples: outputs, weights and other data of the samples.
        counts: number of unpadded samples of each client.
        added_masks: dropout masks of the samples that methods have added, ``[k, M, ...]``.
    """

    step: Step
    masks: DropoutMasks
    x: Tensor
    samples: Samples
    counts: list[int]
    added_masks: dict[str, Tensor]

    @classmethod
    def of(cls, step: Step, masks: DropoutMasks, used: list[int]) -> Joined:
        """Join a step's own and added samples; ``used`` is each client's number of own samples without padding."""
        batch = step.batch
        x, samples = batch.joined_samples(step.cohort.train_outputs)
        counts = samples.mask.sum(1).tolist() if batch.added else used
        return cls(step, masks, x, samples, counts, step.added_masks(masks, range(len(batch.mask))))

    def of_client(self, row: int) -> Given:
        """One client's samples, without padding."""
        own = self.step.dropout_masks_of(self.masks, row, self.step.batch.mask.shape[1])
        dropped = behind(own, {name: mask[row] for name, mask in self.added_masks.items()}, 0)
        x, samples = self.x[row], self.samples.row(row)
        if self.counts[row] == len(x):
            return x, samples, dropped
        return x[samples.mask], samples.without_padding(), {name: mask[samples.mask] for name, mask in dropped.items()}

    def of_stack(self, start: int, stop: int) -> Given:
        """Several clients' samples, with padding."""
        own = self.step.dropout_masks(self.masks, range(start, stop), self.step.batch.mask.shape[1])
        dropped = behind(own, {name: mask[start:stop] for name, mask in self.added_masks.items()}, 1)
        return self.x[start:stop], self.samples.between(start, stop), dropped

    def padded_logits(self, by_first_row: Mapping[int, Tensor]) -> Tensor:
        """Join logits, first row -> ``[n, O]`` of a client's unpadded samples or ``[m, N, O]``, to ``[k, N, O]``."""
        k, count = self.samples.mask.shape
        some = next(iter(by_first_row.values()))
        padded = some.new_zeros((k, count, some.shape[-1]))
        for start, values in by_first_row.items():
            if values.ndim == 3:
                padded[start : start + len(values)] = values
            elif len(values) == count:
                padded[start] = values
            else:
                padded[start, self.samples.mask[start]] = values
        return padded


def behind(masks: dict[str, Tensor], more: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Masks of own samples, then those of added ones; ``more`` may be empty."""
    return {name: torch.cat([mask, more[name]], dim) for name, mask in masks.items()} if more else masks
