"""Scores of clients' models after local training, before they are averaged."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.tiny import SaveAfter, double, fit, source, tiny_client, tiny_data, tiny_trainer, weights
from torch import Tensor

from cfl.callbacks import FederatedOrchestrator, LocalModels
from cfl.data.cohorts import CohortBatch
from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import Dirichlet
from cfl.data.schedule import BoundSchedule
from cfl.data.sequences import FixedTasks
from cfl.data.sources import Binarised
from cfl.data.streams import ClassSplit, Permuted
from cfl.metrics.measures.likelihood import negative_log_likelihoods
from cfl.models import MADE
from cfl.randomness.generators import numpy_generator
from cfl.runtime.errors import ConfigError
from cfl.training.client import Client

ADAM = partial(torch.optim.Adam, lr=0.01)


def data_of(width: int = 3, **options: Any) -> FederatedDataModule:
    """Return data of clients of unequal size, with two rounds for each task."""
    settings: dict[str, Any] = {"num_clients": 5, "partition": Dirichlet(0.5, 3, balance=False), **options}
    schedule = {"rounds_per_task": 2, "clients_per_round": 4, "cohort_width": width, **settings.pop("schedule", {})}
    stream = settings.pop("stream", None) or Permuted(Binarised(source()), 2)
    return tiny_data(stream, scenario="density", schedule=schedule, eval_batch_size=7, **settings)


def run(
    data: FederatedDataModule,
    local: LocalModels,
    ckpt_path: Path | None = None,
    after: Any = (),
    before: Any = (),
    federated: Any = None,
    **network: Any,
) -> Client:
    client = tiny_client(data, double(partial(MADE, **{"hidden": [7], "order_agnostic": True, **network})), ADAM)
    trainer = tiny_trainer(data, federated, callbacks=after)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    place = next(k for k, c in enumerate(callbacks) if isinstance(c, FederatedOrchestrator))
    callbacks[place:place] = [*before, local]
    trainer.fit(client, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return client


def naive_scores(data: FederatedDataModule, client: Client, start: dict[str, Tensor]) -> dict[int, dict[int, float]]:
    """Return task -> client -> NLL by plain loops of federated averaging that score models before they are averaged."""
    network: Any = copy.deepcopy(client.network)
    found: dict[int, dict[int, float]] = {}
    model = start
    for number in range(data.num_rounds):
        plan, ended = data.rounds.round(number), []
        for owner in plan.clients:
            own = copy.deepcopy(network)
            own.load_state_dict(model)
            own.requires_grad_(True)
            optimizer = ADAM(own.parameters())
            places = data.indices[plan.task][owner]
            order = numpy_generator(data.seed, "shuffle", number, owner, 0).permutation(len(places))
            for step, part in enumerate(torch.from_numpy(places[order]).split(data.schedule.batch_size)):
                x, _ = data.gather(plan.task, part)
                loss = negative_log_likelihoods(own.logits(x.double(), own.degrees(number, owner, step)), x).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if plan.last_of_task:
                task = data.tasks[data.stream_task(plan.task, owner)]
                images = task.transform(task.test.images).double()
                degrees = own.evaluation_degrees(0, images.device, owner)
                nats = negative_log_likelihoods(own.logits(images, degrees), images)
                found.setdefault(plan.task, {})[owner] = nats.mean().item()
            ended.append(own.state_dict())
        model = {name: torch.stack([state[name] for state in ended]).mean(0) for name in model}
    return found


@pytest.mark.parametrize("synchronised", [True, False])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("square", [False, True])
def test_it_is_the_plain_loop(width: int, synchronised: bool, square: bool) -> None:
    """Scores equal those of plain loops, for any cohort width, shared or own masks, and clients' own task orders."""
    options: dict[str, Any] = {}
    if square:
        tasks = FixedTasks([[0, 1], [1, 2], [2, 3], [3, 0], [1, 0]])
        options = {"stream": ClassSplit(Binarised(source()), 4), "sequences": tasks, "partition": None}
    local, data = LocalModels(True), data_of(width, **options)
    network = {"synchronised": synchronised}
    start = tiny_client(data, double(partial(MADE, hidden=[7], order_agnostic=True, **network)), ADAM).network
    first = {name: tensor.detach().clone() for name, tensor in start.named_parameters()}
    client = run(data, local, **network)
    expected = naive_scores(data, client, first)
    assert set(local.scores) == {0, 1}
    for task, scores in expected.items():
        assert local.scores[task] == {owner: pytest.approx(nats, abs=1e-9) for owner, nats in scores.items()}
    assert len(expected[1]) == 4
    assert local.summary() == {"nll_of_clients": pytest.approx(sum(expected[1].values()) / 4, abs=1e-9)}


def test_it_changes_nothing() -> None:
    plain = run(data_of(), LocalModels())
    scored = run(data_of(), LocalModels(True))
    assert plain.federation is not None
    assert scored.federation is not None
    assert all(torch.equal(t, weights(plain.federation)[n]) for n, t in weights(scored.federation).items())
    assert LocalModels().summary() == {}


def test_a_resumed_run_knows_earlier_scores(tmp_path: Path) -> None:
    whole, cut, resumed = LocalModels(True), LocalModels(True), LocalModels(True)
    run(data_of(), whole)
    run(data_of(), cut, after=[SaveAfter(2, tmp_path / "2.ckpt")])
    run(data_of(), resumed, tmp_path / "2.ckpt")
    assert resumed.scores == whole.scores == cut.scores


def test_another_fit_forgets_the_scores_of_the_last() -> None:
    local = LocalModels(True)
    run(data_of(), local)
    expected = local.scores
    local.scores = {task: {**scores, 9: 1.0} for task, scores in {**local.scores, 7: {}}.items()}
    run(data_of(), local)
    assert local.scores == expected


class Breaks(Callback):
    """Sets weights of some clients to NaN after their training in one round."""

    def __init__(self, round: int, victims: Sequence[int]) -> None:
        self.round, self.victims = round, victims

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: CohortBatch, batch_idx: int
    ) -> None:
        cohort = pl_module.require_cohort()
        for position in batch.closes:
            if pl_module.federation.round == self.round and cohort.clients[position] in self.victims:
                with torch.no_grad():
                    next(iter(cohort.parameters.values()))[position] = math.nan


@pytest.mark.parametrize("width", [1, 3])
def test_a_client_that_is_left_out_of_the_average_is_left_out_of_the_score(width: int) -> None:
    whole, local, data = LocalModels(True), LocalModels(True), data_of(width)
    run(data_of(width), whole)
    victim, *_ = data.rounds.round(3).clients
    run(data, local, before=[Breaks(3, [victim])], federated={"on_bad_update": "skip"})
    expected = {owner: nats for owner, nats in whole.scores[1].items() if owner != victim}
    assert local.scores == {0: whole.scores[0], 1: expected}
    assert local.summary() == {"nll_of_clients": pytest.approx(sum(expected.values()) / 3)}


def test_a_client_that_drops_out_is_left_out_of_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, local = LocalModels(True), LocalModels(True)
    run(data_of(3), whole)
    lost, *_ = data_of(3).rounds.round(3).clients
    monkeypatch.setattr(BoundSchedule, "dropouts", lambda self, number: frozenset([lost] if number == 3 else []))
    data = data_of(3, schedule={"client_dropout": 0.5})
    run(data, local)
    assert local.scores == {0: whole.scores[0], 1: {o: nats for o, nats in whole.scores[1].items() if o != lost}}


def test_without_a_client_that_counts_there_is_no_score() -> None:
    local = LocalModels(True)
    local.scores = {0: {2: 1.0}, 1: {}}
    assert local.summary() == {"nll_of_clients": None}


def test_a_task_whose_last_round_has_no_client_has_no_score() -> None:
    """With Poisson sampling a round may be empty. The earlier task's score is not shown as the last task's."""
    poisson = {"sampling": "poisson", "clients_per_round": 0.3}
    several = (data_of(schedule=poisson, seed=seed) for seed in range(100))
    data = next(data for data in several if data.rounds.round(1).clients and not data.rounds.round(3).clients)
    local = LocalModels(True)
    run(data, local)
    assert set(local.scores[0]) == {*data.rounds.round(1).clients}
    assert local.summary() == {"nll_of_clients": None}


def test_classifiers_have_no_likelihood() -> None:
    data = tiny_data()
    with pytest.raises(ConfigError, match=r"local_models\.evaluate"):
        fit(tiny_client(data), data, callbacks=[LocalModels(True)])
