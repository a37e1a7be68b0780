"""Takes real local steps on real data to time them, without effect on the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cfl.data.cohort_dealing import local_steps
from cfl.data.cohorts import CohortBlock
from cfl.data.datamodule import FederatedDataModule
from cfl.data.round_loader import RoundLoader
from cfl.engines.base import EngineOptions, StepContext
from cfl.engines.choice import EngineChoice, build_engine
from cfl.engines.cohort import Cohort
from cfl.engines.objective import Objective
from cfl.engines.one_pass import prepare_step
from cfl.engines.probe import Trial
from cfl.runtime.precision import matmul_precision

LONG_RUN = 2000
"""Number of client steps of a run from which its trial records steps at once. Recording takes 0.02 (linear layers) to
0.3 s (convolutions) per batch size, with the first, slow replays; shorter runs gain less by it."""

MOST_STEPS = 4
"""Local steps of a client that a trial takes in one go."""


class Trials:
    """Builds the trials of choices, which :func:`cfl.engines.probe.probe` times.

    Args:
        data: the tasks and their clients.
        round: the round whose largest clients are trained.
        network: the global model, not changed.
        input_shape: ``(C, H, W)``.
        options: how engines are built.
        optimizer_of: returns the clients' optimizer for a cohort's parameters.
        fused_sgd: returns the ``fused_sgd`` of :class:`cfl.engines.base.StepContext` for this optimizer.
        by_hand: see :class:`cfl.engines.workers.WorkerEngine`.

    Attributes:
        client_steps_of_run: local steps of all clients that are still to come.
        most_steps: local steps of the round's largest client.
    """

    def __init__(
        self,
        data: FederatedDataModule,
        round: int,
        network: nn.Module,
        input_shape: tuple[int, int, int],
        options: EngineOptions,
        optimizer_of: Callable[[Iterable[nn.Parameter]], Optimizer],
        fused_sgd: Callable[[Optimizer], tuple[float, float] | None],
        by_hand: bool,
    ) -> None:
        self.data, self.network, self.input_shape, self.options = data, network, input_shape, options
        plan = data.rounds.round(round)
        self.plan = max(plan.parts, key=lambda part: len(part.clients))
        self._optimizer_of, self._fused_sgd_of, self._by_hand = optimizer_of, fused_sgd, by_hand
        sizes = {client: len(data.trained_on(self.plan.task)[client]) for client in self.plan.clients}
        self._largest = sorted(sizes, key=lambda client: (-sizes[client], client))
        held = data.trained_in(plan)
        steps = sum(local_steps(len(held[client]), data.schedule) for client in plan.clients)
        self.client_steps_of_run = steps * (data.num_rounds - round)
        self.most_steps = local_steps(max(sizes.values()), data.schedule)

    def of(self, choice: EngineChoice) -> Trial:
        """The trial of a choice: steps of the round's largest clients, starting from the global model."""
        data = self.data
        clients = tuple(self._largest[: choice.width])
        # A run records its steps after some twenty of them. A trial is shorter, so it must record at once.
        eager = self.client_steps_of_run >= LONG_RUN
        size, by_hand = data.schedule.batch_size, self._by_hand
        engine = build_engine(choice, self.network, self.input_shape, self.options, size, eager, by_hand)
        cohort = Cohort(self.network, len(clients), data.outputs, engine.channels_last)
        optimizer = self._optimizer_of(cohort.parameters.values())
        fused_sgd = self._fused_sgd_of(optimizer) if engine.fuses_sgd else None
        context = StepContext(data.seed, fused_sgd, Objective(measure=data.measure))
        device = next(self.network.parameters()).device
        block = self._block(clients, device)
        shared = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        cohort.open(clients, block.sizes, self.plan.task, self.plan.round, shared, own={})

        def take(part: CohortBlock) -> None:
            if fused_sgd is not None:
                engine.train(cohort, part, context)
                return
            for batch in map(part.step, range(len(part))):
                losses = engine.losses(cohort, batch, context)
                optimizer.zero_grad()
                engine.backward(losses.sum(), cohort)
                prepare_step(optimizer)
                optimizer.step()

        def trial(steps: int) -> float:
            """Seconds per step of as many clients as the choice is wide."""
            _wait(device)
            started = time.perf_counter()
            with matmul_precision(self.options.matmul_precision):
                for start in range(0, steps, len(block)):
                    take(block.part(0, min(len(block), steps - start)))
                _wait(device)
            return (time.perf_counter() - started) / steps * choice.width / len(clients)

        return trial

    def samples(self, count: int) -> Tensor:
        """``[count, C, H, W]`` samples of the round's largest clients, of the network's type and on its device.

        They are repeated if there are not as many in a step.
        """
        some = next(self.network.parameters())
        batch = self._block(tuple(self._largest[:count]), some.device).step(0)
        x = batch.x[batch.mask]
        return x[torch.arange(count, device=x.device) % len(x)].to(some.dtype)

    def _block(self, clients: tuple[int, ...], device: torch.device) -> CohortBlock:
        data = self.data
        schedule = data.schedule.with_width(len(clients))
        plan = replace(self.plan, clients=clients)
        block = next(iter(RoundLoader(plan, data.trained_on(plan.task), schedule, data.seed, block=MOST_STEPS)))
        return replace(cast(CohortBlock, block).to(device), complete=partial(data.with_samples, moment=None))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
