"""Likelihoods of test samples under clients' models directly after local training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from cfl.data.evaluation import EvaluationLoader
from cfl.data.schedule import RoundPlan
from cfl.federation.federation import Federation
from cfl.methods.components.validation_loss import validation_loss
from cfl.models.evaluation import evaluation_mode
from cfl.runtime import distributed
from cfl.runtime.errors import ConfigError
from cfl.runtime.precision import full_precision
from cfl.training.access import data_of, federation_of
from cfl.training.client import Client


class LocalModels(Callback):
    """Scores clients' models before they are averaged, as the column "Client" of CONFEDMADE's Table 2 (as we read it).

    In the last round of each task, a client's score after local training is the mean of ``-log p(x)`` in nats over the
    test samples of the task, under the client's own masks. ``nll_of_clients`` in the run's summary is the mean over the
    clients of that round, for the last task that has ended; the averaged model's score is ``new_nll``. The paper does
    not say on which samples its clients are scored; here all clients are scored on the same samples. Clients that
    ``federated.on_bad_update: skip`` leaves out of the average are left out here, too.

    Scoring takes a pass over the task's test samples per client and task, and changes no result. The
    FederatedOrchestrator calls it before it collects from clients, because collecting overwrites their models.

    Args:
        evaluate: whether to score clients; only for the scenario ``density``.

    Raises:
        ConfigError: the scenario is another one.
    """

    def __init__(self, evaluate: bool = False) -> None:
        self.evaluate = evaluate
        self.scores: dict[int, dict[int, float]] = {}
        """Task -> client -> nats."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse runs without likelihoods."""
        scenario = data_of(trainer).scenario
        if self.evaluate and scenario != "density":
            raise ConfigError("local_models.evaluate", True, f"false with data.scenario: {scenario}")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the scores of an earlier fit."""
        if not federation_of(pl_module).round:
            self.scores = {}

    @torch.no_grad()
    def score(self, client: Client, positions: Sequence[int]) -> None:
        """Score the clients at ``positions``, which have just finished, if their task ends with the round.

        Does nothing if the callback is turned off.
        """
        if not self.evaluate:
            return
        federation, cohort = client.require_federation(), client.require_cohort()
        ended = _ended(federation.schedule.round(federation.round))
        for position in positions:
            owner = cohort.clients[position]
            if owner in ended:
                self.scores.setdefault(ended[owner], {})[owner] = self._score(client, position, owner, ended[owner])

    @staticmethod
    def _score(client: Client, position: int, owner: int, task: int) -> float:
        data, cohort = client.require_federation().data, client.require_cohort()
        tensors = {**cohort.parameters, **cohort.buffers}
        model = {name: tensor[position].detach() for name, tensor in tensors.items()}
        stream_task = data.stream_task(task, owner)
        parts = EvaluationLoader(stream_task, len(data.evaluated[stream_task].test), data.eval_batch_size)
        filled = (data.evaluation_batch(part, client.device) for part in parts)
        batches = ((cast(Tensor, batch.x), cast(Tensor, batch.y)) for batch in filled)
        with evaluation_mode(client.network), full_precision():
            return validation_loss(client.network, model, batches, client=owner)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the scores of clients that were left out of the round; send the others to all processes."""
        if not self.evaluate:
            return
        self._leave_out(federation_of(pl_module))
        if distributed.count() == 1:
            return
        for theirs in distributed.gather(self.scores):
            for task, scores in theirs.items():
                self.scores.setdefault(task, {}).update(scores)

    def _leave_out(self, federation: Federation) -> None:
        """Drop scores of clients that dropped out of the round or trained to NaN.

        These clients are known only after all messages of the round. A task that ends without any score is remembered,
        so that no earlier task's scores pass for its own."""
        number = federation.round - 1
        plan = federation.schedule.round(number)
        ended = _ended(plan)
        for task in {part.task for part in plan.parts if part.last_of_task}:
            self.scores.setdefault(task, {})
        skipped = {owner for round, _, owner in federation.channel.skipped if round == number}
        for owner in skipped.union(federation.channel.dropped_before_message(number)).intersection(ended):
            self.scores.get(ended[owner], {}).pop(owner, None)

    def summary(self) -> dict[str, float | None]:
        """``nll_of_clients``, which is None if no client counts in the last round; empty before a task has ended."""
        if not self.scores:
            return {}
        last = self.scores[max(self.scores)]
        return {"nll_of_clients": sum(last[owner] for owner in sorted(last)) / len(last) if last else None}

    def state_dict(self) -> dict[str, Any]:
        """The scores so far."""
        return {"scores": {task: dict(scores) for task, scores in self.scores.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.scores = {task: dict(scores) for task, scores in state_dict["scores"].items()}


def _ended(plan: RoundPlan) -> dict[int, int]:
    """Client -> task, for clients whose task ends with a round."""
    return {owner: part.task for part in plan.parts if part.last_of_task for owner in part.clients}
