"""Computes clients of a cohort one by one, on threads with one math thread each: the fast way on a CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.engines.base import Engine, Step, StepContext
from cfl.engines.batch_last import BatchLastChain
from cfl.engines.chain import Chain
from cfl.engines.cohort import Cohort
from cfl.engines.freed_memory import keep_freed_memory
from cfl.engines.halves import Halves
from cfl.engines.joined import Joined
from cfl.engines.products import Products
from cfl.engines.recorded import RecordedSteps, Recording, arguments
from cfl.engines.replica import Replica
from cfl.engines.right_factors import RightFactor
from cfl.engines.row_views import RowViews
from cfl.engines.threads import Threads
from cfl.models.dropout import DropoutMasks
from cfl.models.step_draws import StepDraws
from cfl.runtime.errors import EngineCannot

FETCHED_TOGETHER = 2**18
"""Pixels, or words of random bits, up to which a cohort's samples are fetched in one go; 2**18 pixels are 1 MiB."""


Own = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Inputs, outputs and dropout masks of one client's own samples."""


class WorkerEngine(Engine):
    """Computes each client's step by itself: without padding or stacked copies, with weights in a core's cache.

    A network that is a chain of simple layers (:class:`~cfl.engines.chain.Chain`) is trained by hand-written steps,
    any other by autograd on a copy of the network per thread.

    Args:
        network: the architecture; its own parameters are not touched. It must draw no random numbers other than counted
            dropout and those of :mod:`cfl.models.step_draws`.
        input_shape: ``(C, H, W)``.
        threads: number of clients computed at the same time, each with one math thread. With 1 and 0 the caller's
            thread computes: with 1 it uses one math thread, with 0 all that it has.
        stack: number of clients that a thread computes together by batched products, for chains of linear layers. This
            saves calls, which is worth it if layers are small.
        batch_last: hold images and maps with the batch last in memory, for chains with convolutions
            (:class:`~cfl.engines.batch_last.BatchLastChain`); without effect if that is not possible.
        eager: see :class:`~cfl.engines.recorded.RecordedSteps`.
        by_hand: whether steps of chains are hand-written; must be False if the loss is not a function of the logits.
        products: multiplies matrices in hand-written steps; None is torch's default.
    """

    fuses_sgd = True
    pulls = True

    def __init__(
        self,
        network: nn.Module,
        input_shape: tuple[int, int, int],
        threads: int = 0,
        stack: int = 1,
        batch_last: bool = False,
        eager: bool = False,
        by_hand: bool = True,
        products: Products | None = None,
    ) -> None:
        keep_freed_memory()
        self.chain = Chain.of(network, products) if by_hand else None
        turned = BatchLastChain.of_chain(self.chain) if batch_last and self.chain is not None else None
        self.chain = turned or self.chain
        self.channels_last = turned is None and any(isinstance(m, nn.Conv2d) for m in network.modules())
        self.input_shape = tuple(input_shape)
        self.stack = stack if self.chain is not None and self.chain.stackable else 1
        self.leaves_finished_clients = self.stack == 1
        self.masks = DropoutMasks(network, input_shape)
        self.draws = StepDraws(network)
        self._recorded = RecordedSteps(self.chain, eager) if self.chain is not None and self.stack == 1 else None
        self.multiplies = self.chain is not None
        self._threads = Threads(threads)
        self._replicas = [] if self.chain is not None else [Replica(network) for _ in range(max(threads, 1))]
        self._rows = RowViews()

    def losses(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> Tensor:
        """As :meth:`Engine.losses`, without a graph: gradients are computed, or the optimizer's step is taken, here."""
        k, step = len(cohort.clients), Step(cohort, batch, context)
        self._rows.use(cohort, context.pulls, keeps=context.fused_sgd is None)
        losses = torch.zeros(k)
        used = batch.mask.sum(1).tolist() if batch.padded else [batch.mask.shape[1]] * k
        if self._rows.keeps:
            self._forget_gradients([row for row in range(k) if not used[row]])
        stack = 1 if context.right_factors else self.stack
        starts = [s for s in range(0, k, stack) if any(used[s : s + stack])]
        if context.keeps_logits or context.objective.joins(batch):
            self._take_joined_steps(step, used, stack, starts, losses)
            return losses
        outputs = cohort.outputs_in_loss(batch.task)
        recordings = {} if context.right_factors else self._recordings(step, used, outputs)
        fetch = self._fetching(step, used, for_all=stack == 1)

        def body(thread: int, start: int) -> None:
            rows = min(stack, k - start)
            if rows > 1:
                losses[start : start + rows] = self._stacked(step, start, rows, outputs)
            else:
                recording = recordings.get(used[start])
                losses[start] = self._plain_step(step, thread, start, fetch(start), outputs, recording)

        self._threads.run(body, starts)
        self.logits = None
        return losses

    def _forget_gradients(self, idle: list[int]) -> None:
        """Before a step that leaves gradients, set those of the ``idle`` rows, clients without samples, to zero."""
        for replica in self._replicas:
            replica.unused.clear()  # parameters that one step does not use may be used in the next
            replica.used.clear()
        for row in idle:
            for gradient in self._rows.gradients.of(row, 1).values():
                gradient.zero_()

    def _take_joined_steps(self, step: Step, used: list[int], stack: int, starts: list[int], losses: Tensor) -> None:
        """Take steps with added samples, a changed loss or kept logits, and write their losses into ``losses [k]``."""
        context = step.context
        # All clients are joined here at once, because threads take turns in the Python code of small operations.
        joined = Joined.of(step, self.masks, used)
        seen: dict[int, Tensor] | None = {} if context.keeps_logits else None
        recordings: dict[int, Recording | Halves | None] = {}
        if not context.right_factors:
            whole = context.objective.plain and seen is None
            recordings = self._joined_recordings(joined, whole)

        def body(thread: int, start: int) -> None:
            rows = min(stack, len(losses) - start)
            found = self._joined_step(joined, recordings, thread, start, rows, seen)
            losses[start : start + rows] = found

        self._threads.run(body, starts)
        self.logits = joined.padded_logits(seen) if seen else None

    def train(self, cohort: Cohort, block: CohortBlock, context: StepContext) -> Tensor:
        """As :meth:`Engine.train`. A thread takes all of a client's steps in turn, while the client's weights are in
        its core's cache. Threads wait for each other only at the end of the block."""
        batches = block.steps
        stack = 1 if context.right_factors else self.stack
        if stack > 1 or context.keeps_logits or context.objective.joins(batches[0]):
            return super().train(cohort, block, context)
        self._rows.use(cohort, context.pulls, keeps=False)
        losses = torch.zeros(block.mask.shape[:2])
        outputs = cohort.outputs_in_loss(block.task)
        recordings = {} if context.right_factors else self._block_recordings(cohort, block, context, outputs)
        self.failed_step = None

        def body(thread: int, row: int) -> None:
            for number, count in enumerate(block.counts[row]):
                if not count:
                    continue
                step = Step(cohort, batches[number], context)
                try:
                    own = self._own(step, row, count)
                    losses[row, number] = self._plain_step(step, thread, row, own, outputs, recordings.get(count))
                except BaseException:
                    self.failed_step = step.batch.step
                    raise

        self._threads.run(body, range(len(cohort.clients)))
        self.logits = None
        return losses

    def _plain_step(
        self, step: Step, thread: int, row: int, own: Own, outputs: Tensor | None, recording: Recording | None
    ) -> Tensor:
        """Take one client's step on its own samples; return their mean cross-entropy."""
        x, y, dropped = own
        weights = self._rows.weights.of(row, 1)
        if recording is not None:
            held, masks, gradients = self._tensors(step, row, dropped)
            given = arguments(x, y, outputs, held, masks, gradients, pulls=self._rows.pulls.of(row, 1))
            with torch.no_grad():
                return recording(*given)
        update = self._rows.update(row, 1, step.context.fused_sgd)
        if self.chain is not None:
            factors = _of_client(step.context.right_factors, row)
            return self.chain.step(x, y, None, outputs, weights, dropped, update, factors=factors)
        loss_of = partial(_mean_cross_entropy, x, y, outputs)
        return self._by_autograd(step, thread, row, loss_of, dropped)

    def _by_autograd(
        self, step: Step, thread: int, row: int, loss_of: Callable[[nn.Module], Tensor], dropped: dict[str, Tensor]
    ) -> Tensor:
        buffers = {name: buffer[row] for name, buffer in step.cohort.buffers.items()}
        update = self._rows.update(row, 1, step.context.fused_sgd)
        weights = self._rows.weights.of(row, 1)
        return self._replicas[thread].step(loss_of, weights, buffers, dropped | self._drawn(step, row), update)

    def _tensors(
        self, step: Step, row: int, dropped: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """A client's tensors for a recording: weights, dropout masks and, if gradients are kept, gradient rows."""
        gradients = {} if step.context.fused_sgd else self._rows.gradients.of(row, 1)
        return [*self._rows.weights.of(row, 1).values()], [*dropped.values()], [*gradients.values()]

    def gradients(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> dict[str, Tensor]:
        """As :meth:`Engine.gradients`, in other memory than the gradients of the present step, which stay."""
        with self._rows.other_gradients(cohort):
            return super().gradients(cohort, batch, context)

    def _recordings(self, step: Step, used: list[int], outputs: Tensor | None) -> dict[int, Recording | None]:
        """Batch size -> recording of a step, for the sizes in this batch that are worth one."""
        return {
            samples: self._recording(step, used.index(samples), samples, outputs, used.count(samples))
            for samples in {n for n in used if n}
        }

    def _block_recordings(
        self, cohort: Cohort, block: CohortBlock, context: StepContext, outputs: Tensor | None
    ) -> dict[int, Recording | None]:
        """As :meth:`_recordings`, of all steps of a block."""
        steps = Counter(count for of_client in block.counts for count in of_client if count)
        found = {}
        for samples, times in steps.items():
            row, number = next((r, of.index(samples)) for r, of in enumerate(block.counts) if samples in of)
            step = Step(cohort, block.steps[number], context)
            found[samples] = self._recording(step, row, samples, outputs, times)
        return found

    def _recording(self, step: Step, row: int, samples: int, outputs: Tensor | None, times: int) -> Recording | None:
        """The recording of a step of this size, made from a client's row if it pays off with ``times`` more steps."""
        if self._recorded is None:
            return None
        weights, pulls = self._rows.weights.of(row, 1), self._rows.pulls.of(row, 1)
        example = partial(self._own, step, row, samples)
        return self._recorded.step(samples, outputs, step.context.fused_sgd, weights, example, times, pulls=pulls)

    def backward(self, total: Tensor, cohort: Cohort) -> None:
        """Put the gradients on the parameters; autograd adds those of terms that methods added to the losses.

        Raises:
            EngineCannot: some clients of the step use a parameter and others do not.
        """
        if self._rows.keeps:
            k = len(cohort.clients)
            unused = set().union(*(replica.unused for replica in self._replicas))
            by_some = unused & set().union(*(replica.used for replica in self._replicas))
            if by_some:  # momentum and decay would also move the weights of clients that do not use them
                value = f"a network of which some clients of a step use {min(by_some)} and others do not"
                valid = "schedule.cohort_width 1 with it, or SGD without momentum and weight decay"
                raise EngineCannot("model.network", value, valid)
            for name, parameter in cohort.parameters.items():
                parameter.grad = None if name in unused else self._rows.gradients.tensors[name][:k]
        if total.requires_grad:
            total.backward()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _own(self, step: Step, row: int, samples: int) -> Own:
        """The first ``samples`` of one client, with their dropout masks."""
        return *step.batch.samples(row, samples), step.dropout_masks_of(self.masks, row, samples)

    def _fetching(self, step: Step, used: list[int], for_all: bool) -> Callable[[int], Own]:
        """A function of a client's row that returns inputs, outputs and dropout masks of its samples.

        If the function is called ``for_all`` clients and samples are small, they are fetched here at once, because
        threads take turns in the Python code of small operations. Large samples are fetched by the threads.
        """
        k, most = len(used), max(used)
        pixels = math.prod(self.input_shape)
        together = for_all and k > 1 and k * most * max(pixels, self.masks.words_per_sample) <= FETCHED_TOGETHER
        if not together:
            return lambda row: self._own(step, row, used[row])
        x, y = step.batch.stacked_samples(0, k)
        masks = step.dropout_masks(self.masks, range(k), most)

        def of_all(row: int) -> Own:
            samples = used[row]
            return x[row, :samples], y[row, :samples], {name: mask[row, :samples] for name, mask in masks.items()}

        return of_all

    def _joined_recordings(self, joined: Joined, whole: bool) -> dict[int, Recording | Halves | None]:
        """As :meth:`_recordings`, by the number of own and added samples.

        The ``whole`` step is recorded if the loss is the weighted cross-entropy and logits are not kept, else its
        halves.
        """
        if self._recorded is None:
            return {}
        fused_sgd = joined.step.context.fused_sgd
        found: dict[int, Recording | Halves | None] = {}
        for count in {n for n in joined.counts if n}:
            row, times = joined.counts.index(count), joined.counts.count(count)
            weights, pulls = self._rows.weights.of(row, 1), self._rows.pulls.of(row, 1)
            example = partial(_example, joined, row)
            if whole:
                samples = joined.of_client(row)[1]
                found[count] = self._recorded.step(
                    count, samples.allowed, fused_sgd, weights, example, times, samples.weights, pulls
                )
            else:
                found[count] = self._recorded.halves(count, fused_sgd, weights, example, times, pulls)
        return found

    def _joined_step(
        self,
        joined: Joined,
        recordings: Mapping[int, Recording | Halves | None],
        thread: int,
        start: int,
        rows: int,
        seen: dict[int, Tensor] | None,
    ) -> Tensor:
        """Take one job of :meth:`_take_joined_steps`; return its losses, and put logits into ``seen`` by first row."""
        step, objective = joined.step, joined.step.context.objective
        recording = recordings.get(joined.counts[start]) if rows == 1 else None
        x, samples, dropped = joined.of_client(start) if rows == 1 else joined.of_stack(start, start + rows)

        def head(logits: Tensor) -> tuple[Tensor, Tensor]:
            if seen is not None:
                seen[start] = logits.clone()  # the gradient may overwrite them
            return objective.with_gradient(logits, samples)

        def loss_of(network: nn.Module) -> Tensor:
            if seen is None:
                return objective.of_network(network, x, samples)
            loss, seen[start] = objective.with_logits(network, x, samples)
            return loss

        if recording is not None:
            held, masks, gradients = self._tensors(step, start, dropped)
            pulls = self._rows.pulls.of(start, 1)
            if isinstance(recording, Halves):
                return recording.step(x, head, held, masks, gradients, pulls)
            given = arguments(x, samples.y, samples.allowed, held, masks, gradients, samples.weights, pulls)
            with torch.no_grad():
                return recording(*given)
        if self.chain is None:
            return self._by_autograd(step, thread, start, loss_of, dropped)
        factors = _of_client(step.context.right_factors, start)
        update = self._rows.update(start, rows, step.context.fused_sgd)
        weights = self._rows.weights.of(start, rows)
        return self.chain.step(x, samples.y, None, None, weights, dropped, update, head, factors)

    def _drawn(self, step: Step, row: int) -> dict[str, Tensor]:
        """Tensors that a client's network draws in this step, other than dropout masks."""
        if not self.draws:
            return {}
        cohort = step.cohort
        drawn = self.draws.draw(cohort.round, cohort.clients[row : row + 1], step.batch.step, torch.device("cpu"))
        return {name: values[0] for name, values in drawn.items()}

    def _stacked(self, step: Step, start: int, rows: int, outputs: Tensor | None) -> Tensor:
        """Take several clients' steps on their own samples by batched products; return their mean cross-entropies."""
        assert self.chain is not None
        x, y = step.batch.stacked_samples(start, start + rows)
        mask = step.batch.mask[start : start + rows] if step.batch.padded else None
        dropped = step.dropout_masks(self.masks, range(start, start + rows), y.shape[1])
        update = self._rows.update(start, rows, step.context.fused_sgd)
        return self.chain.step(x, y, mask, outputs, self._rows.weights.of(start, rows), dropped, update)


def _of_client(factors: Mapping[str, RightFactor], row: int) -> dict[str, RightFactor]:
    found = {name: factor.of_client(row) for name, factor in factors.items()}
    return {name: factor for name, factor in found.items() if factor is not None}


def _example(joined: Joined, row: int) -> Own:
    x, samples, dropped = joined.of_client(row)
    return x, samples.y, dropped


def _mean_cross_entropy(x: Tensor, y: Tensor, outputs: Tensor | None, network: nn.Module) -> Tensor:
    logits = network(x)
    if outputs is not None:
        logits = logits.masked_fill(~outputs, -torch.inf)
    return F.cross_entropy(logits, y)
