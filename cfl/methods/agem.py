"""Averaged gradient episodic memory (Chaudhry et al., ICLR 2019), at every client."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.scenarios import Scenario
from cfl.engines.cohort import Cohort
from cfl.methods.base import Method
from cfl.methods.components.gradient_projection import conflicts, inner, refine
from cfl.methods.context import Context
from cfl.runtime.option_checks import check_integers


class AGEM(Method):
    """No step may make the loss on the client's own buffer worse, to first order.

    In every local step ``g_b`` is the gradient of the mean cross-entropy on samples drawn from the buffer, at the same
    weights as the step's own gradient g. Where ``g . g_b < 0``, g becomes ``g - (g . g_b / g_b . g_b) g_b`` (eq 11):
    one inner product over all parameters.

    The buffer is the one of Fed-A-GEM (:class:`cfl.federation.replay_buffer.ReplayBuffer`). The network is in training
    mode; BatchNorm normalises the buffer's samples by their own statistics.

    Differs from the paper: the buffer holds samples of the current task too, where the original adds a task's samples
    at its end. Differs from Fed-A-GEM's code: BatchNorm's running statistics do not count the buffer's samples; there
    the pass over them updates these statistics as any training pass does.

    Sends: nothing beyond the model. Storage per client: the buffer. Extra compute: forward and backward of the drawn
    samples in every local step, and three element-wise passes over the gradients. Scenarios: all. Optimizers: the step
    is free of conflict under plain SGD; momentum or Adam may turn it.

    Args:
        batch_size: samples drawn per local step; all that there are, if fewer.

    Raises:
        ConfigError: below 1; or, before training, if there are two of these methods, or gradients are clipped by value
            behind the projection.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain", "density"})
    replays_logits: ClassVar[bool] = False
    task_free = True
    client_clocks = True
    kind: ClassVar[Literal["add", "project", "look"]] = "project"

    def __init__(self, batch_size: int = 32) -> None:
        check_integers("methods.agem", 1, batch_size=batch_size)
        self.batch_size = batch_size
        self._reference: dict[str, Tensor] = {}

    def setup(self, context: Context) -> None:
        """Refuse a second one, which would draw the same samples."""
        super().setup(context)
        self.refuse_twins(AGEM, "one A-GEM with a larger batch_size")

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Compute the buffer's gradient where the step's own will be computed."""
        buffer = self.context.buffer
        assert buffer is not None
        self._reference = {}
        drawn = buffer.draw(cohort, batch, self.batch_size, "A-GEM")
        if drawn is not None:
            # A client without samples has gradient 0, which changes nothing; so has one that is through.
            cohort.use_outputs(drawn.tasks, drawn.mask)
            self._reference = cohort.gradients_on(drawn.as_step_of(batch), "A-GEM dropout")
        return batch

    @torch.no_grad()
    def adjust_gradients(self, cohort: Cohort) -> None:
        """Take what conflicts with the buffer's gradient out of the step's."""
        if self._reference:
            gradients = cohort.gradients
            product = inner(gradients, self._reference)
            length = inner(self._reference, self._reference)
            dtype = next(iter(gradients.values())).dtype
            refine(gradients, self._reference, conflicts(product, length, dtype), product=product, length=length)
