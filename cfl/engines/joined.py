"""Own and added samples of a cohort's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cfl.data.samples import Samples


@dataclass(frozen=True)
class Joined:
    """All samples of a cohort's step, ``[k, N, ...]``, and the number of unpadded ones of each client.

    Attributes:
        x: inputs.
        samples: outputs, weights and other data of the samples.
        counts: number of unpadded samples of each client.
        added_masks: dropout masks of the samples that methods have added, ``[k, M, ...]``.
    """

    x: Tensor
    samples: Samples
    counts: list[int]
    added_masks: dict[str, Tensor]

    def kept(self, row: int, values: Tensor) -> Tensor:
        """One client's values ``[N, ...]`` without those of padding."""
        return values if self.counts[row] == self.samples.mask.shape[1] else values[self.samples.mask[row]]

    def of_client(self, row: int) -> tuple[Tensor, Samples]:
        """Inputs and samples of one client, without padding."""
        samples = self.samples.row(row)
        full = self.counts[row] == self.samples.mask.shape[1]
        return self.kept(row, self.x[row]), samples if full else samples.kept()

    def spread(self, seen: Mapping[int, Tensor]) -> Tensor:
        """Join ``seen``, first row -> ``[n, O]`` of a client's unpadded samples or ``[m, N, O]``, to ``[k, N, O]``."""
        k, count = self.samples.mask.shape
        some = next(iter(seen.values()))
        spread = some.new_zeros((k, count, some.shape[-1]))
        for start, values in seen.items():
            if values.ndim == 3:
                spread[start : start + len(values)] = values
            elif len(values) == count:
                spread[start] = values
            else:
                spread[start, self.samples.mask[start]] = values
        return spread

    def of_clients(self, start: int, stop: int) -> tuple[Tensor, Samples]:
        """Inputs and samples of some clients, with padding."""
        return self.x[start:stop], self.samples.between(start, stop)
