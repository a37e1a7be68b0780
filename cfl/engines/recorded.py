"""Hand-written steps recorded once and replayed without Python.

Threads take turns in running Python code, which on two cores costs 15 to 25 % of a step on small networks. A recording
(``torch.jit.trace``) of the same operations runs outside of Python and gives the same bits. If methods change the loss,
a step is recorded in two halves (:mod:`cfl.engines.halves`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cfl.data.samples import Samples
from cfl.engines.chain import Chain
from cfl.engines.cross_entropy import weighted_cross_entropy
from cfl.engines.halves import Halves, record_halves
from cfl.engines.quadratic_pull import PullSteps
from cfl.engines.tracing import flat, to_be_changed, traced, update_of

WORTH_RECORDING = 24
"""Number of steps of one batch size after which a step is recorded; recording takes as long as some twenty steps."""

MOST_RECORDINGS = 16

Recording = Callable[..., Tensor]


class RecordedSteps:
    """Recordings of a chain's step for one client, one per batch size, kind of loss and kind of update.

    Args:
        chain: the network's layers.
        eager: record at once, for a trial whose steps stand for those of a long run.
    """

    def __init__(self, chain: Chain, eager: bool) -> None:
        self.chain = chain
        self._worth = 1 if eager else WORTH_RECORDING
        self._asked: Counter[tuple[Any, ...]] = Counter()
        self._recordings: dict[tuple[Any, ...], Recording | Halves] = {}

    def step(
        self,
        samples: int,
        outputs: Tensor | None,
        fused_sgd: tuple[float, float] | None,
        weights: Mapping[str, Tensor],
        example: Callable[[], tuple[Tensor, Tensor, Mapping[str, Tensor]]],
        steps: int,
        sample_weights: Tensor | None = None,
        pulls: PullSteps = MappingProxyType({}),
    ) -> Recording | None:
        """The recording for steps like these, made once enough of them have been asked for; None if there is none.

        Several threads must not call this at the same time.

        Args:
            samples: batch size.
            outputs: ``[O]`` bool, or with ``sample_weights`` ``[samples, O]``: outputs in the loss, or None.
            fused_sgd: see :class:`cfl.engines.base.StepContext`.
            weights: of any client.
            example: returns inputs, outputs and dropout masks of a client's batch of this size; they are not changed.
            steps: how many steps are asked for now.
            sample_weights: ``[samples]``, if the loss is the weighted cross-entropy instead of the mean one.
            pulls: on any client, see :class:`~cfl.engines.updates.FusedSgd`.

        Returns:
            A function that takes :func:`arguments` and returns the loss.
        """
        key = (samples, outputs is None, fused_sgd, sample_weights is None, tuple(pulls))
        if self._is_worth(key, steps):
            self._recordings[key] = self._record(outputs, fused_sgd, weights, sample_weights, pulls, *example())
        found = self._recordings.get(key)
        assert not isinstance(found, Halves)
        return found

    def halves(
        self,
        samples: int,
        fused_sgd: tuple[float, float] | None,
        weights: Mapping[str, Tensor],
        example: Callable[[], tuple[Tensor, Tensor, Mapping[str, Tensor]]],
        steps: int,
        pulls: PullSteps,
    ) -> Halves | None:
        """As :meth:`step`, for any loss that is a function of the logits, and for callers that need the logits."""
        key = (samples, fused_sgd, tuple(pulls))
        if self._is_worth(key, steps):
            x, _, masks = example()
            self._recordings[key] = record_halves(self.chain, fused_sgd, weights, x, masks, pulls)
        found = self._recordings.get(key)
        assert found is None or isinstance(found, Halves)
        return found

    def _is_worth(self, key: tuple[Any, ...], steps: int) -> bool:
        """Whether steps like these are to be recorded now."""
        if key in self._recordings:
            return False
        self._asked[key] += steps
        return self._asked[key] >= self._worth and len(self._recordings) < MOST_RECORDINGS

    def _record(
        self,
        outputs: Tensor | None,
        fused_sgd: tuple[float, float] | None,
        weights: Mapping[str, Tensor],
        sample_weights: Tensor | None,
        pulls: PullSteps,
        x: Tensor,
        y: Tensor,
        masks: Mapping[str, Tensor],
    ) -> Recording:
        names, dropping = list(weights), list(masks)

        def step(*given: Tensor) -> Tensor:
            x, y, *rest = given
            allowed = None if outputs is None else rest.pop(0)
            factors = None if sample_weights is None else rest.pop(0)
            held = dict(zip(names, rest[: len(names)], strict=True))
            dropped = dict(zip(dropping, rest[len(names) : len(names) + len(dropping)], strict=True))
            rest = rest[len(names) + len(dropping) :]
            update = update_of(fused_sgd, held, rest, pulls)
            if factors is None:
                return self.chain.step(x, y, None, allowed, held, dropped, update)
            head = partial(weighted_cross_entropy, samples=plain_samples(y, factors, allowed))
            return self.chain.step(x, y, None, None, held, dropped, update, head)

        copies, rows = to_be_changed(weights, fused_sgd)
        # A copy of x: the step may change it, for example by a dropout that comes first, and the client still needs it.
        return traced(step, arguments(x.clone(), y, outputs, copies, list(masks.values()), rows, sample_weights, pulls))


def arguments(
    x: Tensor,
    y: Tensor,
    outputs: Tensor | None,
    weights: list[Tensor],
    masks: list[Tensor],
    rows: list[Tensor],
    sample_weights: Tensor | None = None,
    pulls: PullSteps = MappingProxyType({}),
) -> tuple[Tensor, ...]:
    """Arguments of a recording: x, y, outputs, samples' weights, weights, masks, gradient rows, pulls; without None."""
    optional = [given for given in (outputs, sample_weights) if given is not None]
    return (x, y, *optional, *weights, *masks, *rows, *flat(pulls))


def plain_samples(y: Tensor, weights: Tensor, allowed: Tensor | None) -> Samples:
    """Unpadded samples with outputs, weights and allowed outputs; their tasks and sources have no meaning."""
    return Samples(y, torch.ones_like(y, dtype=torch.bool), weights, y, y, allowed, {})
