"""Clients of a cohort one by one, on threads with one math thread each: the fast way on a CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.engines.base import Engine, StepContext, added_masks, behind, drawn_masks
from cfl.engines.batch_last import BatchLastChain
from cfl.engines.chain import Chain
from cfl.engines.cohort import Cohort
from cfl.engines.freed_memory import keep_freed_memory
from cfl.engines.halves import Halves
from cfl.engines.joined import Joined
from cfl.engines.products import Products
from cfl.engines.recorded import RecordedSteps, Recording, arguments
from cfl.engines.replica import Replica
from cfl.engines.right_factors import ClientFactor, RightFactor
from cfl.engines.threads import Threads
from cfl.engines.updates import KeepGradients, PullRows, StepAtOnce, Update
from cfl.models.dropout import DropoutMasks
from cfl.models.step_draws import StepDraws

FETCHED_TOGETHER = 2**18
"""Pixels, or words of random bits, up to which a cohort's samples are fetched in one go; 2**18 pixels are 1 MiB."""


class WorkerEngine(Engine):
    """Each client's step is computed by itself: no padding, weights that stay in a core's cache, no stacked copies.

    A network that is a chain of simple layers (:class:`~cfl.engines.chain.Chain`) is trained by hand-written steps,
    any other by autograd on a copy of the network per thread.

    Args:
        network: the architecture; its own parameters are not touched. It draws no random numbers but counted dropout.
        input_shape: ``(C, H, W)``.
        threads: number of clients computed at the same time, each with one math thread. 1 and 0 need no thread beside
            the caller's: with 1 it computes with one math thread, with 0 with all it has.
        stack: clients that a thread computes together by batched products, for chains of linear layers; with small
            layers this saves more calls than it costs.
        batch_last: hold images and maps with the batch last in memory, for chains with convolutions
            (:class:`~cfl.engines.batch_last.BatchLastChain`); of no effect where that is not possible.
        eager: see :class:`~cfl.engines.recorded.RecordedSteps`.
        by_hand: whether steps of chains are hand-written; not possible where a loss is no function of the logits.
        products: multiplies matrices in hand-written steps; None is torch's own way.
    """

    kind = "workers"
    steps_at_once = True
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
        self._gradients: dict[str, Tensor] = {}
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._viewed: Cohort | None = None
        self._gradient_views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._pull_rows = PullRows({})
        self._spare: tuple[dict[str, Tensor], dict[tuple[int, int], dict[str, Tensor]]] = ({}, {})
        self._keeps = False

    def losses(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> Tensor:
        """As :meth:`Engine.losses`, without a graph: gradients are ready, or the optimizer's step is taken."""
        k = len(cohort.clients)
        self._keeps = context.fused_sgd is None
        self._look_at(cohort)
        if self._pull_rows.pulls is not context.pulls:
            self._pull_rows = PullRows(context.pulls)
        losses = torch.zeros(k)
        used = batch.mask.sum(1).tolist() if batch.padded else [batch.mask.shape[1]] * k
        outputs = cohort.outputs_in_loss(batch.task)
        if self._keeps:
            for replica in self._replicas:
                replica.unused.clear()  # what has no part in one step may have one in the next
            for row in (row for row in range(k) if not used[row]):
                for gradient in self._rows(self._gradient_views, self._gradients, row, 1).values():
                    gradient.zero_()

        # Joined here for all clients at once: what many small operations cost, threads would wait for one by one.
        joins = context.keeps_logits or context.objective.joins(batch)
        joined = self._join(cohort, batch, context, used) if joins else None
        seen: dict[int, Tensor] | None = {} if context.keeps_logits else None
        factors = context.right_factors
        stack = 1 if factors else self.stack
        recordings: dict[int, Recording | None] = {}
        joined_recordings: dict[int, Recording | Halves | None] = {}
        if joined is None and not factors:
            recordings = self._recordings(cohort, batch, context, used, outputs)
        elif joined is not None and not factors:
            whole = context.objective.plain and seen is None
            joined_recordings = self._joined_recordings(cohort, batch, context, joined, whole)
        fetch = self._fetching(cohort, batch, context, used, stack == 1 and joined is None)

        def body(thread: int, start: int) -> None:
            rows = min(stack, k - start)
            update = self._update(cohort, start, rows, context)
            if joined is not None:
                losses[start : start + rows] = self._joined_step(
                    cohort, batch, context, joined, joined_recordings, thread, start, rows, update, seen
                )
            elif rows > 1:
                losses[start : start + rows] = self._stacked(cohort, batch, context, start, rows, outputs, update)
            else:
                x, y, dropped = fetch(start)
                losses[start] = self._plain_step(
                    cohort, batch, context, thread, start, x, y, dropped, outputs, recordings.get(used[start]), update
                )

        starts = [s for s in range(0, k, stack) if any(used[s : s + stack])]
        self._threads.run(body, starts)
        self.logits = None if joined is None or not seen else joined.spread(seen)
        return losses

    def train(self, cohort: Cohort, block: CohortBlock, context: StepContext) -> Tensor:
        """As :meth:`Engine.train`: a thread takes a client from its first step to its last, while the client's weights
        are in its core's cache, and threads meet once."""
        batches = block.steps
        stack = 1 if context.right_factors else self.stack
        if stack > 1 or context.keeps_logits or context.objective.joins(batches[0]):
            return super().train(cohort, block, context)
        self._keeps = False
        self._look_at(cohort)
        if self._pull_rows.pulls is not context.pulls:
            self._pull_rows = PullRows(context.pulls)
        losses = torch.zeros(block.mask.shape[:2])
        outputs = cohort.outputs_in_loss(block.task)
        recordings = {} if context.right_factors else self._block_recordings(cohort, block, context, outputs)
        self.failed_step = None

        def body(thread: int, row: int) -> None:
            update = self._update(cohort, row, 1, context)
            for number, count in enumerate(block.counts[row]):
                if not count:
                    continue
                batch = batches[number]
                try:
                    x, y = batch.samples(row, count)
                    dropped = self._dropped(cohort, batch, context, range(row, row + 1), count, single=True)
                    losses[row, number] = self._plain_step(
                        cohort, batch, context, thread, row, x, y, dropped, outputs, recordings.get(count), update
                    )
                except BaseException:
                    self.failed_step = batch.step
                    raise

        self._threads.run(body, range(len(cohort.clients)))
        self.logits = None
        return losses

    def _plain_step(
        self,
        cohort: Cohort,
        batch: CohortBatch,
        context: StepContext,
        thread: int,
        row: int,
        x: Tensor,
        y: Tensor,
        dropped: dict[str, Tensor],
        outputs: Tensor | None,
        recording: Recording | None,
        update: Update,
    ) -> Tensor:
        """The mean cross-entropy of one client's own samples, and what becomes of its gradients."""
        weights = self._rows(self._views, cohort.data, row, 1)
        if recording is not None:
            rows_of = {} if context.fused_sgd else self._rows(self._gradient_views, self._gradients, row, 1)
            held, masks, gradients = ([*values.values()] for values in (weights, dropped, rows_of))
            given = arguments(x, y, outputs, held, masks, gradients, pulls=self._pull_rows.of(row, 1))
            with torch.no_grad():
                return recording(*given)
        if self.chain is not None:
            own = _of_client(context.right_factors, row)
            return self.chain.step(x, y, None, outputs, weights, dropped, update, factors=own)
        buffers = {n: b[row] for n, b in cohort.buffers.items()}
        loss_of = partial(_mean_cross_entropy, x, y, outputs)
        return self._replicas[thread].step(loss_of, weights, buffers, dropped | self._drawn(cohort, batch, row), update)

    def gradients(self, cohort: Cohort, batch: CohortBatch, context: StepContext) -> dict[str, Tensor]:
        """As :meth:`Engine.gradients`, in memory of its own."""
        self._look_at(cohort)  # which gives up memory that belongs to another cohort
        own, logits, keeps = (self._gradients, self._gradient_views), self.logits, self._keeps
        self._gradients, self._gradient_views = self._spare
        try:
            return super().gradients(cohort, batch, context)
        finally:
            self._spare = (self._gradients, self._gradient_views)
            self._gradients, self._gradient_views = own
            self.logits, self._keeps = logits, keeps

    def _recordings(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, used: list[int], outputs: Tensor | None
    ) -> dict[int, Recording | None]:
        """Batch size -> recording of a step, for the sizes in this batch that are worth one."""
        found = {}
        for samples in {n for n in used if n}:
            row = used.index(samples)
            found[samples] = self._recording(cohort, batch, context, row, samples, outputs, used.count(samples))
        return found

    def _block_recordings(
        self, cohort: Cohort, block: CohortBlock, context: StepContext, outputs: Tensor | None
    ) -> dict[int, Recording | None]:
        """As :meth:`_recordings`, of all steps of a block."""
        steps = Counter(count for of_client in block.counts for count in of_client if count)
        found = {}
        for samples, number in steps.items():
            row, step = next((r, of.index(samples)) for r, of in enumerate(block.counts) if samples in of)
            found[samples] = self._recording(cohort, block.steps[step], context, row, samples, outputs, number)
        return found

    def _recording(
        self,
        cohort: Cohort,
        batch: CohortBatch,
        context: StepContext,
        row: int,
        samples: int,
        outputs: Tensor | None,
        steps: int,
    ) -> Recording | None:
        """The recording of a step with so many samples, made on a client's row if ``steps`` more are worth it."""
        if self._recorded is None:
            return None

        def example() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            masks = self._dropped(cohort, batch, context, range(row, row + 1), samples, single=True)
            return *batch.samples(row, samples), masks

        weights, pulls = self._rows(self._views, cohort.data, row, 1), self._pull_rows.of(row, 1)
        return self._recorded.step(samples, outputs, context.fused_sgd, weights, example, steps, pulls=pulls)

    def backward(self, total: Tensor, cohort: Cohort) -> None:
        """Hand the gradients over; what methods added to the losses goes through autograd on top of them."""
        if self._keeps:
            k = len(cohort.clients)
            unused = set().union(*(replica.unused for replica in self._replicas))
            for name, parameter in cohort.parameters.items():
                parameter.grad = None if name in unused else self._gradients[name][:k]
        if total.requires_grad:
            total.backward()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _look_at(self, cohort: Cohort) -> None:
        if self._viewed is not cohort:
            self._viewed = cohort
            self._views.clear()
            self._gradient_views.clear()
            self._gradients = {}
            self._spare = ({}, {})
        if self._keeps and not self._gradients:
            self._gradients = {n: torch.zeros_like(room) for n, room in cohort.data.items()}

    @staticmethod
    def _rows(
        cache: dict[tuple[int, int], dict[str, Tensor]], tensors: Mapping[str, Tensor], start: int, rows: int
    ) -> dict[str, Tensor]:
        """Views of a client's tensors, or of a stack's; kept, because making them anew costs more than a small step."""
        key = (start, rows)
        if key not in cache:
            cache[key] = {n: t[start] if rows == 1 else t[start : start + rows] for n, t in tensors.items()}
        return cache[key]

    def _update(self, cohort: Cohort, start: int, rows: int, context: StepContext) -> Update:
        if context.fused_sgd is None:
            return KeepGradients(self._rows(self._gradient_views, self._gradients, start, rows))
        weights = self._rows(self._views, cohort.data, start, rows)
        return StepAtOnce(weights, *context.fused_sgd, self._pull_rows.of(start, rows))

    def _dropped(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, rows: range, samples: int, single: bool
    ) -> dict[str, Tensor]:
        masks = drawn_masks(self.masks, context, cohort, batch, rows, samples, torch.device("cpu"))
        return {n: m[0] for n, m in masks.items()} if single else masks

    def _fetching(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, used: list[int], for_all: bool
    ) -> Callable[[int], tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """A function of a client's row: inputs, outputs and dropout masks of its samples.

        Where it is to be called ``for_all``, small ones are fetched here for all clients at once: what many small
        operations cost, threads would wait for one by one. Large ones are left to the threads.
        """
        k, most = len(used), max(used)
        pixels = math.prod(self.input_shape)
        together = for_all and k > 1 and k * most * max(pixels, self.masks.words_per_sample) <= FETCHED_TOGETHER
        if not together:

            def alone(row: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                x, y = batch.samples(row, used[row])
                return x, y, self._dropped(cohort, batch, context, range(row, row + 1), len(y), single=True)

            return alone
        x, y = batch.stacked_samples(0, k)
        masks = self._dropped(cohort, batch, context, range(k), most, single=False)

        def of_all(row: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            samples = used[row]
            return x[row, :samples], y[row, :samples], {name: mask[row, :samples] for name, mask in masks.items()}

        return of_all

    def _join(self, cohort: Cohort, batch: CohortBatch, context: StepContext, used: list[int]) -> Joined:
        """All samples of a batch, of which ``used`` own ones of each client are no padding."""
        k, count = batch.mask.shape
        x, samples = batch.joined_samples(0, k, count, cohort.train_outputs)
        masks = added_masks(self.masks, context, cohort, batch, range(k), torch.device("cpu"))
        return Joined(x, samples, samples.mask.sum(1).tolist() if batch.added else used, masks)

    def _joined_masks(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, joined: Joined, row: int
    ) -> dict[str, Tensor]:
        """Dropout masks of one client's unpadded samples."""
        own = self._dropped(cohort, batch, context, range(row, row + 1), batch.mask.shape[1], single=True)
        dropped = behind(own, {name: mask[row] for name, mask in joined.added_masks.items()}, 0)
        return {name: joined.kept(row, mask) for name, mask in dropped.items()}

    def _joined_recordings(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, joined: Joined, whole: bool
    ) -> dict[int, Recording | Halves | None]:
        """As :meth:`_recordings`, by number of samples with added ones: of the ``whole`` step, where the loss is the
        weighted cross-entropy and nobody asks for logits, or of its halves.
        """
        if self._recorded is None:
            return {}
        found: dict[int, Recording | Halves | None] = {}
        for count in {n for n in joined.counts if n}:
            row, steps = joined.counts.index(count), joined.counts.count(count)
            weights, pulls = self._rows(self._views, cohort.data, row, 1), self._pull_rows.of(row, 1)
            example = partial(self._joined_example, cohort, batch, context, joined, row)
            if whole:
                samples = joined.of_client(row)[1]
                found[count] = self._recorded.step(
                    count, samples.allowed, context.fused_sgd, weights, example, steps, samples.weights, pulls
                )
            else:
                found[count] = self._recorded.halves(count, context.fused_sgd, weights, example, steps, pulls)
        return found

    def _joined_example(
        self, cohort: Cohort, batch: CohortBatch, context: StepContext, joined: Joined, row: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, samples = joined.of_client(row)
        return x, samples.y, self._joined_masks(cohort, batch, context, joined, row)

    def _joined_step(
        self,
        cohort: Cohort,
        batch: CohortBatch,
        context: StepContext,
        joined: Joined,
        recordings: Mapping[int, Recording | Halves | None],
        thread: int,
        start: int,
        rows: int,
        update: Update,
        seen: dict[int, Tensor] | None,
    ) -> Tensor:
        """With added samples, or a loss that methods have a word in; logits go to ``seen`` by first row."""
        weights = self._rows(self._views, cohort.data, start, rows)
        recording: Recording | Halves | None = None
        if rows > 1:
            assert self.chain is not None
            x, samples = joined.of_clients(start, start + rows)
            clients = range(start, start + rows)
            own = self._dropped(cohort, batch, context, clients, batch.mask.shape[1], single=False)
            more = {name: mask[start : start + rows] for name, mask in joined.added_masks.items()}
            dropped = behind(own, more, 1)
        else:
            x, samples = joined.of_client(start)
            dropped = self._joined_masks(cohort, batch, context, joined, start)
            recording = recordings.get(joined.counts[start])

        def head(logits: Tensor) -> tuple[Tensor, Tensor]:
            if seen is not None:
                seen[start] = logits.clone()  # the gradient may be computed in its memory
            return context.objective.with_gradient(logits, samples)

        if recording is not None:
            of_rows = {} if context.fused_sgd else self._rows(self._gradient_views, self._gradients, start, 1)
            held, masks, gradients = ([*values.values()] for values in (weights, dropped, of_rows))
            pulls = self._pull_rows.of(start, 1)
            if isinstance(recording, Halves):
                return recording.step(x, head, held, masks, gradients, pulls)
            with torch.no_grad():
                return recording(
                    *arguments(x, samples.y, samples.allowed, held, masks, gradients, samples.weights, pulls)
                )
        if self.chain is not None:
            factors = _of_client(context.right_factors, start)
            return self.chain.step(x, samples.y, None, None, weights, dropped, update, head, factors)
        buffers = {n: b[start] for n, b in cohort.buffers.items()}

        def loss_of(network: nn.Module) -> Tensor:
            if seen is None:
                return context.objective.of_network(network, x, samples)
            loss, seen[start] = context.objective.with_logits(network, x, samples)
            return loss

        return self._replicas[thread].step(
            loss_of, weights, buffers, dropped | self._drawn(cohort, batch, start), update
        )

    def _drawn(self, cohort: Cohort, batch: CohortBatch, row: int) -> dict[str, Tensor]:
        """What a client's network draws in this step, beside dropout."""
        if not self.draws:
            return {}
        drawn = self.draws.draw(cohort.round, cohort.clients[row : row + 1], batch.step, torch.device("cpu"))
        return {name: values[0] for name, values in drawn.items()}

    def _stacked(
        self,
        cohort: Cohort,
        batch: CohortBatch,
        context: StepContext,
        start: int,
        rows: int,
        outputs: Tensor | None,
        update: Update,
    ) -> Tensor:
        assert self.chain is not None
        x, y = batch.stacked_samples(start, start + rows)
        mask = batch.mask[start : start + rows] if batch.padded else None
        dropped = self._dropped(cohort, batch, context, range(start, start + rows), y.shape[1], single=False)
        weights = self._rows(self._views, cohort.data, start, rows)
        return self.chain.step(x, y, mask, outputs, weights, dropped, update)


def _of_client(factors: Mapping[str, RightFactor], row: int) -> dict[str, ClientFactor]:
    found = {name: factor.of_client(row) for name, factor in factors.items()}
    return {name: factor for name, factor in found.items() if factor is not None}


def _mean_cross_entropy(x: Tensor, y: Tensor, outputs: Tensor | None, network: nn.Module) -> Tensor:
    logits = network(x)
    if outputs is not None:
        logits = logits.masked_fill(~outputs, -torch.inf)
    return F.cross_entropy(logits, y)
