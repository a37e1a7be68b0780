"""Runs a round: cohorts of clients start, take their local steps and are collected, then the round ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from cfl.data.cohorts import CohortBatch, CohortBlock
from cfl.data.schedule import RoundPlan
from cfl.engines.base import Engine, StepContext
from cfl.engines.cohort import Cohort
from cfl.engines.objective import Objective
from cfl.engines.one_pass import prepare_step
from cfl.engines.scaled_steps import ScaledSteps
from cfl.federation.channel import UPDATE
from cfl.federation.federated_model import MODEL_TOPIC
from cfl.federation.federation import Federation
from cfl.methods.capabilities import BatchExtension, Penalty
from cfl.methods.composition import Composition
from cfl.randomness.generators import seed_device, seed_for
from cfl.runtime import distributed
from cfl.runtime.error_context import ErrorContext
from cfl.runtime.precision import full_precision, matmul_precision
from cfl.training.blocks import steps_per_block
from cfl.training.fused_sgd import fused_sgd_of
from cfl.training.round_end import end_round
from cfl.training.round_losses import RoundLosses
from cfl.training.trained_outputs import TrainedOutputs


class LocalWork:
    """The local training of a round's clients, cohort after cohort.

    A round is :meth:`begin_round`, its cohorts, :meth:`close_round`. A cohort is :meth:`open`, its steps, and
    :meth:`finish` whenever some of its clients have taken their last step. Steps are taken by :meth:`train`, several at
    a time, or one by one: :meth:`losses`, :meth:`backward`, :meth:`adjust_gradients`, the optimizer's own step,
    :meth:`rescale`. Errors name the failed action, its round and its clients.

    Args:
        federation: the federation whose clients are trained, and whose global model is updated.
        engine: computes the local steps.
        width: greatest number of clients that are trained side by side.
        objective: what a client minimises.
        precision: torch's float32 matmul precision in local steps. Outside of them products have full precision.
        watched: whether code other than methods reads gradients. It is called at most once per cohort.
        blocks: whether rounds may come in blocks of several local steps.

    Attributes:
        cohort: the clients being trained.
        plan: the running round; None before the first.
        context: settings that all steps of the cohort share.
        finish: called with the positions of clients that have taken their last step; by default :meth:`collect`.
    """

    def __init__(
        self,
        federation: Federation,
        engine: Engine,
        width: int,
        objective: Objective,
        precision: str,
        watched: Callable[[], bool],
        blocks: bool,
    ) -> None:
        self.federation, self.engine, self._seed = federation, engine, federation.data.seed
        self.cohort = Cohort(federation.network, width, federation.data.outputs, engine.channels_last)
        self.methods = cast(Composition, federation.methods)
        self.buffer = federation.buffer
        self.plan: RoundPlan | None = None
        self.context = StepContext(self._seed, objective=objective)
        self._objective = objective
        self._plain_objective = Objective(measure=objective.measure)
        self._precision, self._watched = precision, watched
        self._device = next(federation.network.parameters()).device
        self.finish: Callable[[tuple[int, ...]], None] = self.collect
        self._losses = RoundLosses()
        self._blocks, self._began, self._steps = blocks, 0.0, 0
        self._optimizer: Optimizer | None = None
        self._scaled_steps: ScaledSteps | None = None
        self._frozen: frozenset[str] = frozenset()
        self._trains = True
        self._outputs = TrainedOutputs()
        self._located = ErrorContext(self._step_that_failed)
        self.cohort.gradients_on = self.gradients_on
        self.methods.attend(self.cohort)

    # A round begins.

    def begin_round(self, plan: RoundPlan) -> None:
        """Begin a round, and the tasks that begin with it, and send the global model to the round's clients."""
        federation = self.federation
        self.plan = plan
        self._losses, self._outputs = RoundLosses(), TrainedOutputs()
        self._began, self._steps = time.perf_counter(), 0
        federation.channel.enter_round(plan.task, plan.round)
        announced = self.methods.releases(plan)
        federation.channel.ledger.enter_round(federation.sample(plan) if announced else None, announced)
        for part in plan.parts:
            if part.round_in_task == 0:
                with full_precision(), self._in_round(f"beginning task {part.task}"):
                    self.methods.begin_task(part)
        receivers = len(federation.data.trained_here(plan))
        federation.channel.ask(plan.clients)
        federation.channel.downlink("model", federation.model.shared_tensors(), receivers)

    # A cohort opens.

    def open(self, batch: CohortBatch | CohortBlock, optimizer: Optimizer) -> None:
        """Start the clients of a cohort's first batch, from the global model and with a fresh optimizer.

        Args:
            batch: the step or block that opens the cohort.
            optimizer: the optimizer of the cohort's parameters. Its state is cleared.
        """
        with full_precision(), self._in_round(f"opening clients {list(batch.clients)}"):
            self._open(batch, optimizer)

    def _open(self, batch: CohortBatch | CohortBlock, optimizer: Optimizer) -> None:
        cohort, federation, plan = self.cohort, self.federation, self.require_plan()
        # Named by a client, because every process has a cohort number 0.
        seed_device(self._device, seed_for(self._seed, "dropout", plan.round, batch.clients[0]))
        cohort.open(
            batch.clients,
            batch.sizes,
            batch.task,
            plan.round,
            shared=federation.model.state_tensors(),
            own=federation.model.personal_state(batch.clients),
            mixed=federation.data.by_global_index,
        )
        optimizer.state.clear()
        cohort.lr = float(optimizer.param_groups[0]["lr"])
        self._optimizer = optimizer
        self._losses.open(batch.clients, self._device)
        if self.buffer is not None:
            self.buffer.open(cohort)
        self.methods.start_clients()

    def _settle_steps(self) -> None:
        """Set :attr:`context` and the other settings for all steps of the new cohort."""
        methods, optimizer = self.methods, cast(Optimizer, self._optimizer)
        self._scaled_steps = ScaledSteps.of(methods.step_factors(), self.cohort.buffers)
        self._frozen = self.federation.model.frozen | methods.frozen_parameters()
        self._trains = not self._frozen >= self.cohort.parameters.keys()
        # In mixed precision the step is Lightning's, which scales losses and looks for overflows.
        mixed = torch.is_autocast_enabled(self._device.type)
        fuses = self.engine.fuses_sgd and not mixed and self._scaled_steps is None and not self._frozen
        fused_sgd = fused_sgd_of(optimizer, methods, self.engine, self._watched) if fuses else None
        wanted, factors = methods.left_to_engine(self.engine)
        pulls = {} if fused_sgd is None else {name: pull.step(*fused_sgd) for name, pull in wanted.items()}
        keeps_logits = self.buffer is not None and self.buffer.wants_logits
        self.context = StepContext(self._seed, fused_sgd, self._objective, factors, pulls, keeps_logits)

    # Several local steps.

    def train(self, block: CohortBlock) -> Tensor:
        """Take a block's local steps, optimizer included, and finish the clients whose last step is among them.

        Returns:
            ``[]``, the sum of all losses.

        Raises:
            RuntimeError: as :meth:`losses`.
        """
        if block.opens:
            self._settle_steps()
        if self._in_one_go:
            return self._train_in_one_go(block)
        total = torch.zeros((), device=self._device)
        optimizer = cast(Optimizer, self._optimizer)
        for batch in map(block.step, range(len(block))):  # one at a time: each fetches its samples
            gradients = partial(self._gradients_of, batch, optimizer)
            total += gradients() if self.context.fused_sgd is not None else optimizer.step(gradients)  # type: ignore[arg-type]
            self.rescale()
            if batch.closes:
                self.finish(batch.closes)
        return total

    def _gradients_of(self, batch: CohortBatch, optimizer: Optimizer) -> Tensor:
        """Compute a step's gradients for the optimizer, and return the sum of its losses, detached."""
        losses = self._step_losses(batch).sum()
        if self.context.fused_sgd is None:
            optimizer.zero_grad()
        self.backward(losses)
        self.adjust_gradients(optimizer)
        return losses.detach()

    @property
    def _in_one_go(self) -> bool:
        """Whether the engine computes whole blocks: no buffer, method or optimizer has a part in single steps."""
        others = self.buffer is not None or self.methods.with_capability(BatchExtension)
        alone = not others and not self.federation.data.by_global_index and self.context.fused_sgd is not None
        return alone and self.engine.leaves_finished_clients

    def _train_in_one_go(self, block: CohortBlock) -> Tensor:
        self.cohort.steps = block.first + 1
        self._steps += len(block)
        with self._located, matmul_precision(self._precision):
            losses = self.engine.train(self.cohort, block, self.context)
        for number, batch in enumerate(block.steps):
            self.cohort.steps = batch.step + 1
            self._losses.add(losses[:, number], batch)
            if batch.closes:
                self.finish(batch.closes)
        return losses.sum()

    # A local step.

    def losses(self, batch: CohortBatch) -> Tensor:
        """Return ``[]``, the sum over the cohort of each client's loss on its own batch.

        If all parameters are frozen, the sum is 0 and nothing is computed, so that running statistics do not change.

        Raises:
            RuntimeError: the step failed. The message names round, task, clients and step; the failure is its cause.
        """
        if batch.opens:
            self._settle_steps()
        return self._step_losses(batch).sum()

    def _step_losses(self, batch: CohortBatch) -> Tensor:
        cohort, buffer = self.cohort, self.buffer
        cohort.steps = batch.step + 1
        self._steps += 1
        if not self._trains:
            return torch.zeros(len(cohort.clients), device=self._device, requires_grad=True)
        with self._located:
            with matmul_precision(self._precision):
                batch = self._extended(batch)
                losses = self.engine.losses(cohort, batch, self.context)
            self._losses.add(losses.detach(), batch)
            if buffer is not None:
                logits = self.engine.logits if self.context.keeps_logits else None
                buffer.offer(cohort, batch, None if logits is None else logits[:, : batch.mask.shape[1]].detach())
            with full_precision() if self.methods.with_capability(Penalty) else nullcontext():
                return self.methods.penalties(losses)

    def _extended(self, batch: CohortBatch) -> CohortBatch:
        """The step with the samples that methods add to it. The outputs that it trains are registered in the cohort."""
        batch = self.methods.extend_batch(batch)
        if batch.tasks_of_own is not None:
            self.cohort.use_outputs(batch.task_ids, self.cohort.trained_on(batch.mask))
        for added in batch.added:  # not for clients that have finished before others
            self.cohort.use_outputs(added.tasks, added.mask & batch.mask.any(1, keepdim=True))
        return batch

    @property
    def mean_loss(self) -> float:
        """Mean of the finite losses of all clients' local steps in the round so far; NaN if there are none."""
        return self._losses.mean

    def gradients_on(self, batch: CohortBatch, purpose: str) -> dict[str, Tensor]:
        """Gradients on another batch, name -> ``[k, ...]``, without frozen parameters.

        See :attr:`cfl.engines.cohort.Cohort.gradients_on`."""
        context = StepContext(self._seed, objective=self._plain_objective, purpose=purpose)
        with matmul_precision(self._precision):
            found = self.engine.gradients(self.cohort, batch.unwrapped(), context)
        return {name: gradient for name, gradient in found.items() if name not in self._frozen}

    def backward(self, loss: Tensor) -> None:
        """Let the engine compute the gradients of the last :meth:`losses`; frozen parameters get none."""
        if not self._trains:
            return
        with self._located, matmul_precision(self._precision):
            self.engine.backward(loss, self.cohort)
        for name in self._frozen:
            # None instead of zero: with a gradient of zero, optimizers would still apply weight decay and momentum.
            self.cohort.parameters[name].grad = None

    def adjust_gradients(self, optimizer: Optimizer) -> None:
        """Let methods change the clients' gradients, and prepare the optimizer for its step.

        Raises:
            RuntimeError: as :meth:`losses`.
        """
        if not self._trains:
            return
        with self._located:
            with full_precision() if self.methods else nullcontext():
                self.methods.adjust_gradients()
            prepare_step(optimizer)
            if self._scaled_steps is not None:
                self._scaled_steps.remember(self.cohort.parameters)

    def rescale(self) -> None:
        """Rescale the step just taken for clients whose learning rate differs from the optimizer's."""
        if self._scaled_steps is not None:
            self._scaled_steps.rescale()

    def _step_that_failed(self) -> str:
        cohort = self.cohort
        step = cohort.steps - 1 if self.engine.failed_step is None else self.engine.failed_step
        who = f"local step {step} of clients {list(cohort.clients)}"
        return f"{who} failed in round {cohort.round} (task {cohort.task})"

    # Clients finish.

    def collect(self, positions: tuple[int, ...]) -> None:
        """Send the messages of clients that have taken their last step, and store the state that they keep.

        Args:
            positions: rows of these clients in the cohort.
        """
        closing = [self.cohort.clients[position] for position in positions]
        with full_precision(), self._in_round(f"collecting from clients {closing}"):
            self._collect(positions)

    @torch.no_grad()
    def _collect(self, positions: tuple[int, ...]) -> None:
        cohort, federation = self.cohort, self.federation
        federation.channel.enter_round(cohort.task, cohort.round)  # with clients' own clocks, the cohort's task
        cohort.put_back_unused_outputs(positions)
        clients, sound = [cohort.clients[p] for p in positions], positions
        if self.buffer is not None or self.methods.collects:
            # If any tensor of a client is not finite, everything it sends this round is dropped.
            usable = federation.channel.usable(federation.model.trained_tensors(cohort, positions), clients)
            sound = tuple(p for p, good in zip(positions, usable, strict=True) if good)
        if sound and self.buffer is not None:
            self.buffer.close(cohort, sound)
        if sound:
            self.methods.finish_clients(sound)
        trained = cohort.rows(positions, {**cohort.parameters, **cohort.buffers})
        by_samples = federation.client_weighting == "samples"
        weights = [float(cohort.sizes[p]) if by_samples else 1.0 for p in positions]
        # In place: the weights are not needed any more, and allocating new memory would double the time of this method.
        update = {n: trained[n].sub_(cohort.global_parameters[n]) for n in federation.model.shared_parameters}
        message = cohort.to_server({**update, **{n: trained[n] for n in federation.model.shared_buffers}})
        if self.methods.protection is not None:
            message = self.methods.bounded_updates(message)
        if federation.model.personal:
            own = cohort.to_server({n: rows for n, rows in trained.items() if n in federation.model.personal})
            usable = federation.channel.usable({**message, **own}, clients)
            weights = [weight if good else 0.0 for weight, good in zip(weights, usable, strict=True)]
            federation.clients.scatter(MODEL_TOPIC, clients, own, usable)
        if message:
            came = federation.channel.uplink(UPDATE, message, weights, clients)
            self._outputs.add(cohort, [row for row, there in zip(positions, came, strict=True) if there])

    # The round is closed.

    def close_round(self) -> None:
        """End the round with the messages that have been collected."""
        with full_precision(), self._in_round("closing the round"):
            self.federation.clients.synchronise()  # methods may need the state of any client below
            self._hear_others()
            end_round(self.federation, self.require_plan(), self._outputs)

    def _hear_others(self) -> None:
        """Exchange clients' losses, trained outputs and seconds per step between processes."""
        seconds = (time.perf_counter() - self._began) / self._steps if self._steps else 0.0
        if distributed.count() > 1:
            mask = None if self._outputs.mask is None else self._outputs.mask.cpu()
            heard = distributed.gather((self._losses.of_clients, mask, seconds))
            self._losses = RoundLosses({client: sums for known, _, _ in heard for client, sums in known.items()})
            self._outputs.join([mask for _, mask, _ in heard])
            seconds = max(of_process for _, _, of_process in heard)
        if self._blocks and self.require_plan().clients:
            self.federation.data.steps_per_block = steps_per_block(seconds)

    def require_plan(self) -> RoundPlan:
        """Return :attr:`plan`.

        Raises:
            RuntimeError: no round has started.
        """
        if self.plan is None:
            raise RuntimeError("no round has started")
        return self.plan

    def _in_round(self, what: str) -> ErrorContext:
        plan = self.require_plan()
        return ErrorContext(lambda: f"{what} failed in round {plan.round} (task {plan.task})")
