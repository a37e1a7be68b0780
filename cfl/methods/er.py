"""Experience replay (Chaudhry et al., 2019, "On Tiny Episodic Memories"), at every client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from cfl.data.cohorts import CohortBatch
from cfl.data.samples import ExtraSamples
from cfl.data.schedule import RoundPlan
from cfl.engines.cohort import Cohort
from cfl.federation.replay_memory import Table, append, choose, empty_table, reservoir
from cfl.methods.base import Method, Report
from cfl.methods.capabilities import SampleWeights, has
from cfl.methods.context import Context
from cfl.randomness.generators import numpy_generator, seed_for
from cfl.runtime.errors import ConfigError
from cfl.runtime.moving import moved
from cfl.runtime.option_checks import MOST_AT_ONCE, check_choices, check_integers, check_numbers

Weighting = Literal["equal", "mean", "count", "appended"]


class ER(Method):
    """Trains every client on some of its earlier samples together with new ones.

    The local loss is ``L_new + weight L_memory``, the mean cross-entropies of the step's own samples and of samples
    drawn from the client's memory, each over its own task's outputs. ``weighting: mean`` divides it by ``1 + weight``,
    so that clients with a memory take no larger steps than those without. ``weighting: count`` is the mean over both
    together, the loss of a batch to which the memory's samples are appended. ``weighting: appended`` is
    ``(n L_new + weight m L_memory) / (n + m)``, the expected loss of batches from a training set of n samples to which
    the memory's m samples are appended. The memory holds unaugmented images; under ``data.augmentation`` they are
    augmented anew in every step, as the step's own samples are.

    FOT's adaptation (Appendix F.2, F.4): all stored samples are in every batch, and "the loss of that is equally
    contributed", which may mean ``equal`` or ``mean``. It is not clear whether the paper's totals (125 samples for 125
    clients) are per task (F.2: "a certain number of data points from each task"), the default here, or for the whole
    run (F.4: "total number of stored data among all clients"). FOT's tables use the second, ``per_task: false``.

    Sends: nothing beyond the model. Storage per client: at most ``memory_samples`` (in the summary) raw samples with
    label and task. Extra compute: forward and backward of the drawn samples in every local step. Scenarios: task-,
    class- and domain-incremental. Optimizers: any.

    Args:
        size: samples that a client keeps: of every task, or in total without ``per_task``.
        per_task: keep ``size`` samples of every task, chosen uniformly from the client's own; else one reservoir of
            ``size`` samples over everything it has seen.
        update: when samples enter the memory. ``task``: at the end of each task, chosen from all of a client's samples
            of it, even if the client was never sampled. ``step``: after every local step, the samples of the step, in
            every epoch anew, unless the client does not train on them (CFeD's reviewing clients); needs
            ``per_task: false``.
        batch_size: memory samples per local step, drawn uniformly without replacement; null takes all.
        weight: factor of the memory's loss; with 0 and cross-entropy it is federated averaging.
        weighting: ``equal`` or ``mean``: both losses count the same (times ``weight``), as above; ``count``: every
            sample of the step counts the same, the memory's times ``weight``; ``appended``: every sample of the
            client's training set and memory counts the same, the memory's times ``weight``.

    Raises:
        ConfigError: an option is out of range, or ``per_task`` is given with ``update: step``; or, before training,
            clients train on all earlier samples anyway.
    """

    _draws = "er"  # prefix of the purposes of random draws

    common_order: ClassVar[bool] = True
    asks_after_tasks = False

    def __init__(
        self,
        size: int = 1,
        per_task: bool = True,
        update: Literal["task", "step"] = "task",
        batch_size: int | None = None,
        weight: float = 1.0,
        weighting: Weighting = "equal",
    ) -> None:
        key = self.key
        check_integers(key, 1, at_most=MOST_AT_ONCE, size=size)
        check_integers(key, 1, or_null=True, batch_size=batch_size)
        check_choices(key, ("task", "step"), update=update)
        if update == "step" and per_task:
            raise ConfigError(f"{key}.per_task", True, "false with update: step, which does not wait for a task's end")
        check_numbers(key, "[0, inf)", weight=weight)
        check_choices(key, get_args(Weighting), weighting=weighting)
        self.size, self.per_task, self.update = size, per_task, update
        self.batch_size, self.weight, self.weighting = batch_size, weight, weighting
        self._table: Table = {}
        self._added: ExtraSamples | None = None

    def setup(self, context: Context) -> None:
        """Give every client an empty memory.

        Raises:
            ConfigError: if clients train on all earlier samples anyway, or two of these methods draw the same samples.
        """
        super().setup(context)
        methods = context.methods.items()
        twins = [name for name, method in methods if isinstance(method, ER) and method._draws == self._draws]
        if len(twins) > 1:
            valid = f"one {type(self).__name__} with a greater size or weight: two would draw the same samples"
            raise ConfigError("methods", twins, valid)
        if context.exposure in ("cumulative", "joint"):
            valid = "sequential with a replay memory: earlier tasks' samples are in the training set here"
            raise ConfigError("data.exposure", context.exposure, valid)
        self._slots = max(self.size * (context.num_tasks - 1), 1) if self.per_task else self.size
        self._empty = empty_table(self._slots)

    @property
    def _topic(self) -> str:
        return f"{self.name} memory"

    # Local training.

    def start_clients(self, cohort: Cohort) -> None:
        """Load the clients' memories."""
        self._table = self.context.clients.gather(self._topic, cohort.clients, self._empty)
        self._added = None

    def extend_batch(self, cohort: Cohort, batch: CohortBatch) -> CohortBatch:
        """Add the memory's samples to a step."""
        added = self._drawn(cohort, batch) if self.weight > 0 else None
        if self.update == "step":
            offered = batch.index_on_cpu.masked_fill(~cohort.trained_on(batch.mask_on_cpu), -1)
            reservoir(self._table, batch.task, offered, self._keys("reservoir", cohort.clients))
        return batch if added is None else batch.with_added(added)

    def _drawn(self, cohort: Cohort, batch: CohortBatch) -> ExtraSamples | None:
        """The samples of the memories for this step; None while they are empty."""
        context = self.context
        whole = self.update == "task" and (self.batch_size is None or self.batch_size >= self._slots)
        if whole and self._added is not None and not context.augments:
            return self._counted(self._added, batch)  # the same in every step of the round
        count = self._slots if self.batch_size is None else self.batch_size
        keys = self._keys("draw", cohort.clients, cohort.round, 0 if whole else batch.step)
        tasks, index, mask = choose(self._table, count, keys)
        if not mask.any():
            return None
        device = batch.index.device
        # Masked entries repeat one of the client's own samples, so that padding is always valid data.
        tasks = torch.where(mask, tasks, batch.task)
        index = torch.where(mask, index, batch.index_on_cpu[:, :1])
        x, y = context.samples_of(tasks, index, (cohort.round, batch.step), device)
        tasks, mask = moved(tasks, device), moved(mask, device)
        weights = self.weight * mask.double() / mask.sum(1, keepdim=True).clamp(min=1)
        own_factor = None
        if self.weighting == "appended":
            own, held = moved(torch.tensor(cohort.sizes), device), moved((self._table["index"] >= 0).sum(1), device)
            total = (own + held).clamp(min=1)
            weights, own_factor = weights * (held.double() / total).unsqueeze(1), own.double() / total
        elif self.weighting == "mean":
            own_factor = 1.0 / (1.0 + self.weight * mask.any(1).double())
            weights = weights * own_factor.unsqueeze(1)
        self._added = ExtraSamples(x, y, tasks, mask, weights, self.source, own_factor=own_factor)
        return self._counted(self._added, batch)

    def _counted(self, added: ExtraSamples, batch: CohortBatch) -> ExtraSamples:
        """With ``count``, weight the samples by the number of own samples in this step."""
        if self.weighting != "count":
            return added
        own, kept = batch.mask.sum(1), added.mask.sum(1)
        total = (own + kept).clamp(min=1)
        weights = self.weight * added.mask.double() / total.unsqueeze(1)
        return replace(added, weights=weights, own_factor=own.double() / total)

    @property
    def computes_locally(self) -> bool:
        """Whether the memory has a weight, is filled in local steps, or changes the weights of own samples."""
        reweighs = has(self, SampleWeights) and not self.reweighs_added_only
        return self.weight > 0 or self.update == "step" or reweighs

    def finish_clients(self, cohort: Cohort, positions: Sequence[int]) -> None:
        """Store the memories of clients that have finished."""
        if self.update == "step":
            rows = torch.tensor(positions)
            clients = [cohort.clients[p] for p in positions]
            self.context.clients.scatter(
                self._topic, clients, {name: values[rows] for name, values in self._table.items()}
            )

    # After a task.

    def end_task(self, plan: RoundPlan) -> None:
        """Let every client that holds the task choose samples of it."""
        context = self.context
        if self.update != "task" or context.is_last(plan.task):
            return
        clients = context.own_clients(plan.task, context.members(plan.task))
        if not clients:
            return
        held = [context.indices(plan.task, client) for client in clients]
        offered = torch.full((len(clients), max(map(len, held))), -1, dtype=torch.int64)
        for row, (client, own) in enumerate(zip(clients, held, strict=True)):
            generator = numpy_generator(context.seed, f"{self._draws} choice", plan.task, client)
            offered[row, : len(own)] = torch.from_numpy(generator.permutation(own))
        table = context.clients.gather(self._topic, clients, self._empty)
        if self.per_task:
            append(table, plan.task, offered[:, : self.size])
        else:
            reservoir(table, plan.task, offered, self._keys("reservoir", clients))
        context.clients.scatter(self._topic, clients, table)

    def _keys(self, purpose: str, clients: Sequence[int], *indices: int) -> Tensor:
        seed, purpose = self.context.seed, f"{self._draws} {purpose}"
        return torch.tensor([seed_for(seed, purpose, client, *indices) for client in clients], dtype=torch.int64)

    def client_storage(self) -> int:
        """Bytes of a full memory, a byte per pixel, with label and task; 0 if no task end ever fills it."""
        if self.update == "task" and self.context.num_tasks == 1:
            return 0
        return self._slots * (math.prod(self.context.input_shape) + 2)

    def report(self) -> Report:
        """Number of samples that a client can keep."""
        return Report({"memory_samples": self._slots})
