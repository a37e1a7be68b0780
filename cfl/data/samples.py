"""The samples of a local step as losses receive them: the step's own, and those that methods add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfl.data.task_handles import TaskHandles, unwrap_tasks


@dataclass(frozen=True)
class ExtraSamples:
    """Samples that a method adds to one local step of up to K clients, such as replayed ones.

    Entries whose ``mask`` is False may have any finite values. See :func:`cfl.data.added_samples.check_samples`.

    Attributes:
        x: ``[K, M, C, H, W]`` network input.
        y: ``[K, M]`` int64 output index.
        tasks: ``[K, M]`` int64 task of every sample, or handles.
        mask: ``[K, M]`` bool, False where a client has fewer.
        weights: ``[K, M]`` float64, factor of each sample's cross-entropy in its client's loss; the factor of the
            step's own samples is 1 over their number.
        source: number of the method that added the samples; 0 stands for the step's own.
        extras: name -> ``[K, M, ...]``, further tensors for the method's loss.
        own_factor: ``[K]`` factor of the weights of the step's own samples, or None for 1.
    """

    x: Tensor
    y: Tensor
    tasks: Tensor | TaskHandles
    mask: Tensor
    weights: Tensor
    source: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    own_factor: Tensor | None = None


class Samples(NamedTuple):
    """The N samples of one client's step as a loss receives them; with leading axes, those of several clients.

    Attributes:
        y: ``[N]`` int64 output index, or ``[N, D]`` numbers where these are the targets.
        mask: ``[N]`` bool, False where padded.
        weights: ``[N]`` factor of each sample's cross-entropy, 0 where padded.
        tasks: ``[N]`` int64.
        source: ``[N]`` int64, 0 for the step's own samples; see :class:`ExtraSamples`.
        allowed: ``[N, O]`` bool, outputs in the loss of each sample, or None for all.
        extras: name -> ``[N, ...]``, 0 for samples without this extra.
    """

    y: Tensor
    mask: Tensor
    weights: Tensor
    tasks: Tensor
    source: Tensor
    allowed: Tensor | None
    extras: dict[str, Tensor]

    @property
    def axes(self) -> Any:
        """``in_dims`` of several clients' samples for ``torch.vmap``, in the same structure."""
        named: Any = Samples
        return named(0, 0, 0, 0, 0, None if self.allowed is None else 0, dict.fromkeys(self.extras, 0))

    def row(self, row: int) -> Samples:
        """The samples ``[N]`` of one of several clients ``[k, N]``."""
        return self._each(lambda values: values[row])

    def between(self, start: int, stop: int) -> Samples:
        """The samples of the clients ``start .. stop - 1``, ``[stop - start, N]``."""
        return self._each(lambda values: values[start:stop])

    def without_padding(self) -> Samples:
        """One client's samples without padding."""
        return self._each(lambda values: values[self.mask])

    def without_tasks(self) -> Samples:
        """The same samples with all tasks -1, for the losses of task-free methods."""
        return self._replace(tasks=torch.full_like(self.tasks, -1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Samples:
        plain = (self.y, self.mask, self.weights, self.tasks, self.source)
        y, mask, weights, tasks, source = map(change, plain)
        allowed = None if self.allowed is None else change(self.allowed)
        return Samples(y, mask, weights, tasks, source, allowed, {n: change(v) for n, v in self.extras.items()})


def join_samples(
    y: Tensor,
    mask: Tensor,
    tasks: Tensor,
    extras: Mapping[str, Tensor],
    added: Sequence[ExtraSamples],
    train_outputs: Tensor | None,
) -> Samples:
    """Own samples and added ones side by side, ``[K, B + M]``.

    Args:
        y: ``[K, B]`` int64 output index of the step's own samples.
        mask: ``[K, B]`` bool, False where padded.
        tasks: ``[K, B]`` int64.
        extras: name -> ``[K, B, ...]``.
        added: what methods have added.
        train_outputs: ``[T, O]`` bool, outputs in the loss of each task, or None for all.
    """
    all_tasks = torch.cat([tasks, *(unwrap_tasks(a.tasks) for a in added)], 1)
    weights = mask.double() / mask.sum(1, keepdim=True).clamp(min=1)
    for part in added:
        if part.own_factor is not None:
            weights = weights * part.own_factor.unsqueeze(1)
    training = mask.any(1, keepdim=True)  # a client that has taken its last step gets no added samples
    valid = [a.mask & training for a in added]
    parts = [(y.shape[1], extras), *((a.y.shape[1], a.extras) for a in added)]
    sources = [(mask, 0), *((a.mask, a.source) for a in added)]
    return Samples(
        torch.cat([y, *(_outputs(a.y, v) for a, v in zip(added, valid, strict=True))], 1),
        torch.cat([mask, *valid], 1),
        torch.cat([weights, *(a.weights.masked_fill(~v, 0.0) for a, v in zip(added, valid, strict=True))], 1),
        all_tasks,
        torch.cat([torch.full_like(part, source, dtype=torch.int64) for part, source in sources], 1),
        None if train_outputs is None else train_outputs[all_tasks],
        {name: _joined(name, parts) for name in dict.fromkeys(n for _, known in parts for n in known)},
    )


def _outputs(y: Tensor, valid: Tensor) -> Tensor:
    """Added samples' targets; outputs of padding become 0, because losses look up any output before they drop it."""
    return y.masked_fill(~valid, 0) if y.ndim == 2 and not y.is_floating_point() else y


def _joined(name: str, parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> Tensor:
    """Concatenate an extra of all samples, with zeros for parts (number of samples, extras) that lack it."""
    known = next(extras[name] for _, extras in parts if name in extras)
    return torch.cat(
        [
            extras[name] if name in extras else known.new_zeros((known.shape[0], size, *known.shape[2:]))
            for size, extras in parts
        ],
        1,
    )
