"""Dark experience replay (Buzzega et al., NeurIPS 2020), at every client."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples, Samples
from cfl.data.scenarios import Scenario
from cfl.engines.cohort import Cohort
from cfl.methods.base import Method
from cfl.methods.components.weighted_sum import weighted_sum
from cfl.runtime.option_checks import check_choices, check_integers, check_numbers


class DER(Method):
    """Keeps the network's outputs on earlier samples close to those at the time when the samples were stored.

    Every local step minimises, with samples drawn from the client's buffer (eq 5 and 6)::

        CE(own) + alpha mean (h(x') - z')^2 + beta CE(x'', y'')

    where ``z'`` are the logits of ``x'`` when it was trained on. The mean is over samples and outputs, as in the
    authors' code and in Fed-A-GEM's. Both papers print a squared norm, a sum over outputs (``over_outputs: sum``).
    ``beta`` above 0 is DER++, with a separate draw. Logits are compared over the outputs in the sample's own loss: all
    outputs if classes compete.

    Differs from the authors' code: own and drawn samples go through the network together, so that BatchNorm normalises
    them together; there they are two passes. The buffer holds the current task's samples too.

    Sends: nothing beyond the model. Storage per client: the buffer, with a number per sample and output. Extra compute:
    forward and backward of the drawn samples in every local step. Scenarios: task-, class- and domain-incremental;
    regression and detection, with their losses in place of CE. Optimizers: any.

    Args:
        alpha: weight of the logits, at least 0; Fed-A-GEM's tables take 1, and 0.3 on split CIFAR-10.
        beta: weight of the labels, at least 0; 0 is DER.
        batch_size: samples per local step and draw, or all of the buffer if it holds fewer.
        over_outputs: whether a sample's squared differences of logits are their ``mean`` over outputs (the codes) or
            their ``sum`` (the papers). With O outputs in the loss, ``alpha`` then counts O times as much.

    Raises:
        ConfigError: an option is out of range.
    """

    scenarios: ClassVar[frozenset[Scenario]] = frozenset({"task", "class", "domain", "regression", "detection"})
    replays_logits = True
    task_free = True
    client_clocks = True
    reweighs_added_only = True

    def __init__(
        self, alpha: float = 1.0, beta: float = 0.0, batch_size: int = 32, over_outputs: Literal["mean", "sum"] = "mean"
    ) -> None:
        check_numbers("methods.der", "[0, inf)", alpha=alpha, beta=beta)
        check_integers("methods.der", 1, batch_size=batch_size)
        check_choices("methods.der", ("mean", "sum"), over_outputs=over_outputs)
        self.alpha, self.beta, self.batch_size = alpha, beta, batch_size
        self.over_outputs = over_outputs
        self.replays_logits = alpha > 0

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add the buffer's samples to a step: one draw for their logits, one for their labels."""
        buffer = self.context.buffer
        assert buffer is not None
        draws = [("logits", self.alpha, 0.0), ("labels", 0.0, self.beta)]
        for purpose, of_logits, of_labels in draws:
            if of_logits + of_labels == 0:
                continue
            drawn = buffer.draw(cohort, batch, self.batch_size, f"{self.name} {purpose}")
            if drawn is None:
                return batch
            share = drawn.mask.double() / drawn.mask.sum(1, keepdim=True).clamp(min=1)
            extras = {}
            if drawn.logits is not None:
                extras = {f"{self.name} logits": drawn.logits, f"{self.name} weight": of_logits * share}
            batch = batch.with_added(
                ExtraSamples(drawn.x, drawn.y, drawn.tasks, drawn.mask, of_labels * share, self.source, extras)
            )
        return batch

    def sample_loss(self, logits: Tensor, samples: Samples) -> Tensor:
        """``alpha mean (h(x') - z')^2``, or with the sum over outputs."""
        weights = samples.extras.get(f"{self.name} weight")
        if weights is None:
            return logits.new_zeros(())
        squares = (logits - samples.extras[f"{self.name} logits"].to(logits.dtype)).square()
        allowed = samples.allowed
        if self.over_outputs == "sum":
            losses = (squares if allowed is None else squares * allowed).sum(-1)
        elif allowed is None:
            losses = squares.mean(-1)
        else:
            losses = (squares * allowed).sum(-1) / allowed.sum(-1).clamp(min=1)
        return weighted_sum(losses, weights, samples.mask)
