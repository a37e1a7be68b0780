"""Averaged gradient episodic memory (Chaudhry et al., ICLR 2019), at every client."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.scenarios import EVERY_SCENARIO
from cfl.engines.cohort import Cohort
from cfl.methods.base import Method
from cfl.methods.components.gradient_projection import conflicts, inner, refine
from cfl.methods.context import Context
from cfl.runtime.option_checks import check_integers


class AGEM(Method):
    """Projects local gradients so that no step increases the loss on the client's own buffer, to first order.

    In every local step ``g_b`` is the gradient of the mean cross-entropy on samples drawn from the buffer, at the same
    weights as the step's own gradient g. If ``g . g_b < 0``, g becomes ``g - (g . g_b / g_b . g_b) g_b`` (eq 11). The
    inner product is over all parameters.

    The buffer is the one of Fed-A-GEM (:class:`cfl.federation.replay_buffer.ReplayBuffer`). The network is in training
    mode; BatchNorm normalises the buffer's samples by their own statistics.

    Differs from the paper: the buffer also holds samples of the current task; the original adds a task's samples at its
    end. Differs from Fed-A-GEM's code: the buffer's samples do not change BatchNorm's running statistics; there the
    pass over them updates the statistics as any training pass does.

    Sends: nothing beyond the model. Storage per client: the buffer. Extra compute: forward and backward of the drawn
    samples in every local step, and three element-wise passes over the gradients. Scenarios: all. Optimizers: any. The
    guarantee holds for plain SGD; momentum and Adam may change the direction of the step.

    Args:
        batch_size: samples drawn per local step, or all of the buffer if it holds fewer.

    Raises:
        ConfigError: ``batch_size`` is below 1; or, before training, there are two of these methods, or gradients are
            clipped by value after the projection.
    """

    scenarios = EVERY_SCENARIO
    replays_logits: ClassVar[bool] = False
    task_free = True
    client_clocks = True
    kind: ClassVar[Literal["add", "project", "look"]] = "project"

    def __init__(self, batch_size: int = 32) -> None:
        check_integers("methods.agem", 1, batch_size=batch_size)
        self.batch_size = batch_size
        self._reference: dict[str, Tensor] = {}

    def setup(self, context: Context) -> None:
        """Refuse a second A-GEM, which would draw the same samples."""
        super().setup(context)
        self.refuse_twins(AGEM, "one A-GEM with a larger batch_size")

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Compute the gradient on samples of the buffer, at the weights of the step."""
        buffer = self.context.buffer
        assert buffer is not None
        self._reference = {}
        drawn = buffer.draw(cohort, batch, self.batch_size, "A-GEM")
        if drawn is not None:
            # Clients without samples, and clients that have finished, have gradient 0, which changes nothing.
            cohort.use_outputs(drawn.tasks, drawn.mask)
            self._reference = cohort.gradients_on(drawn.as_step_of(batch), "A-GEM dropout")
        return batch

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Project the step's gradients by the buffer's gradient."""
        if self._reference:
            gradients, reference = cohort.gradients, self._reference
            product, length = inner(gradients, reference), inner(reference, reference)
            rows = conflicts(product, length, next(iter(gradients.values())).dtype)
            refine(gradients, reference, rows, product, length)
