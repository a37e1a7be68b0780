"""Analytic heads against ridge regression over all samples at once, in float64, and their messages and storage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.tiny import (
    MOMENTUM,
    Rounds,
    double,
    fit,
    mlp,
    norm_net,
    permuted,
    sgd,
    source,
    split,
    tiny_client,
    tiny_data,
)
from torch import Tensor

from cfl.data.datamodule import FederatedDataModule
from cfl.data.partitions import IID, ClassesPerClient, Dirichlet
from cfl.data.streams import ClassSplit
from cfl.engines.cohort import Cohort
from cfl.engines.vmapped import VmapEngine
from cfl.federation import repeated_tests
from cfl.federation.federation import Federation
from cfl.methods import GPM, AnalyticHead, CFeD, Method, PersonalLayers, analytic_head
from cfl.models import Network
from cfl.runtime.errors import ConfigError
from cfl.testing.comparing import distance
from cfl.training.client import Client


def data_of(stream: Any = None, **options: Any) -> FederatedDataModule:
    """Four clients, three tasks of two classes and two rounds."""
    settings = {"scenario": "class", "partition": Dirichlet(1.0, 3, balance=False), **options}
    schedule = {"rounds_per_task": 2, **settings.pop("schedule", {})}
    return tiny_data(stream or split(3, classes=6, train=120), schedule=schedule, **settings)


class Losses(Callback):
    """Notes each round's loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Client)
        self.losses.append(pl_module.mean_loss)


def run(
    method: Method, data: FederatedDataModule, network: Any = mlp, optimizer: Any = sgd, **options: Any
) -> Federation:
    return fit(tiny_client(data, double(network), optimizer, {"analytic_head": method}), data, **options)


def features(
    federation: Federation, data: FederatedDataModule, task: int, part: str, random: Tensor | None
) -> np.ndarray:
    """Features ``[n, m]`` of all training or test samples of a task, under the global model."""
    samples = data.tasks[task]
    network = federation.network.eval()
    assert isinstance(network, Network)
    with torch.no_grad():
        found = network.features(samples.transform(getattr(samples, part).images).double())
    return (found if random is None else torch.relu(found @ random)).numpy()


def labels(data: FederatedDataModule, task: int, part: str) -> np.ndarray:
    return (getattr(data.tasks[task], part).labels + data.outputs.offsets[task]).numpy()


def centralised(
    federation: Federation, data: FederatedDataModule, ridge: float, random: Tensor | None = None
) -> np.ndarray:
    """Head ``[O, m]`` by least squares over all clients' samples, with a row ``sqrt(ridge)`` added for each feature."""
    tasks = range(data.num_tasks)
    x = np.concatenate([features(federation, data, task, "train", random) for task in tasks])
    y = np.eye(data.num_outputs)[np.concatenate([labels(data, task, "train") for task in tasks])]
    padded = np.concatenate([x, np.sqrt(ridge) * np.eye(x.shape[1])])
    targets = np.concatenate([y, np.zeros((x.shape[1], data.num_outputs))])
    return np.linalg.lstsq(padded, targets, rcond=None)[0].T


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.2, 3, balance=False), ClassesPerClient(1)])
@pytest.mark.parametrize("random_features", [None, 40])
def test_it_is_ridge_regression_over_all_samples_at_once(partition: Any, random_features: int | None) -> None:
    data, method = data_of(partition=partition), AnalyticHead(0.3, random_features)
    federation = run(method, data)
    expected = centralised(federation, data, 0.3, method._map)
    assert method.weight is not None
    assert method.weight.dtype == torch.float64
    np.testing.assert_allclose(method.weight.numpy(), expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    matrix = federation.accuracy.compute()
    for task in range(3):
        scores = features(federation, data, task, "test", method._map) @ expected.T
        found = (scores.argmax(1) == labels(data, task, "test")).mean()
        assert matrix[2, task].item() == pytest.approx(100 * found, abs=1e-9)


def test_the_order_of_the_tasks_does_not_matter() -> None:
    """The network is frozen from the start."""
    weights = []
    for order in ([0, 1, 2], [2, 0, 1]):
        data = data_of(ClassSplit(source(6, train=120), 3, class_order="natural", task_order=order))
        method = AnalyticHead(0.3, train_backbone=False)
        federation = run(method, data)
        assert method.weight is not None
        np.testing.assert_allclose(method.weight.numpy(), centralised(federation, data, 0.3), rtol=0, atol=1e-9)
        places = [2 * order.index(task) + number for task in range(3) for number in range(2)]
        weights.append(method.weight[places])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("network", [mlp, norm_net])
def test_nothing_moves_after_the_first_task(network: Any) -> None:
    """Momentum, weight decay, the server's momentum and running statistics change neither weights nor scores."""
    watch, data, method = Rounds(), data_of(), AnalyticHead()
    federation = run(method, data, network, MOMENTUM, federated={"server_momentum": 0.5}, callbacks=[watch])
    names = [name for name, _ in federation.network.named_parameters()]
    first, last = ({name: watch.models[at][name] for name in names} for at in (1, -1))
    assert distance(watch.models[0], watch.models[1]) > 1e-3
    assert all(torch.equal(first[name], last[name]) for name in names)
    x = data.tasks[0].transform(data.tasks[0].test.images)
    found = method.classify(0, federation.model.state_tensors(), x)
    then = method.classify(0, watch.models[1], x)
    assert found is not None
    assert then is not None
    assert torch.equal(found, then)


@pytest.mark.parametrize("network", [mlp, norm_net])
def test_a_given_network_is_never_trained(network: Any) -> None:
    data, method = data_of(), AnalyticHead(0.3, train_backbone=False)
    client = tiny_client(data, double(network), sgd, {"analytic_head": method})
    before = {name: value.clone() for name, value in client.network.state_dict().items()}
    federation = fit(client, data)
    assert all(torch.equal(before[name], value) for name, value in federation.network.named_parameters())
    federation.network.load_state_dict(before)
    assert method.weight is not None
    np.testing.assert_allclose(method.weight.numpy(), centralised(federation, data, 0.3), rtol=0, atol=1e-9)


def test_bytes_are_counted_and_classes_that_nobody_has_shown_are_not_chosen() -> None:
    class Scores(Method):
        def __init__(self) -> None:
            self.found: list[Tensor] = []

        def end_round(self, plan: Any) -> None:
            if plan.round_in_task == 0:
                scores = method.classify(0, self.context.state_tensors(), x)
                lowest = scores if scores is None else scores.amin(1, keepdim=True)
                self.found.append(torch.zeros(0) if scores is None else (scores > lowest).any(0))

    data, method, scores = data_of(partition=IID()), AnalyticHead(), Scores()
    x = data.tasks[0].transform(data.tasks[0].test.images)
    federation = fit(tiny_client(data, double(mlp), sgd, {"analytic_head": method, "scores": scores}), data)
    assert [found.tolist() for found in scores.found] == [[], [True] * 2 + [False] * 4, [True] * 4 + [False] * 2]
    assert federation.channel.uplink_bytes["analytic_head"] == 3 * 4 * 8 * (8 * 9 // 2 + 2 * 8)
    assert federation.client_storage() == 0
    assert method.report().figures == {"features": 8, "server_bytes": 8 * (8 * 8 + 2 * 6 * 8)}


def test_a_task_that_nobody_has_shown_is_answered_by_one_of_its_own_classes() -> None:
    """An answer among another task's outputs would make FWT some 50 points too low."""
    data = data_of(scenario="task")
    matrix = run(AnalyticHead(0.3, train_backbone=False), data).accuracy.compute()
    for task in (1, 2):
        tested = labels(data, task, "test")
        shares = [100 * (tested == output).mean() for output in np.unique(tested)]
        assert min(abs(matrix[0, task].item() - share) for share in shares) < 1e-4


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("train_backbone", [True, False])
def test_no_local_step_is_computed_of_a_frozen_network(
    train_backbone: bool, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are skipped in blocks, and one by one as with Lightning's gradient clipping."""
    stepped, losses = [], VmapEngine.losses

    def counted(engine: VmapEngine, cohort: Cohort, *others: Any) -> Tensor:
        stepped.append(cohort.round)
        return losses(engine, cohort, *others)

    monkeypatch.setattr(VmapEngine, "losses", counted)
    data, told = data_of(), Losses()
    method = AnalyticHead(0.3, train_backbone=train_backbone)
    client = tiny_client(data, double(norm_net), MOMENTUM, {"analytic_head": method})
    federation = fit(client, data, callbacks=[told], gradient_clip_val=1.0 if one_by_one else None)
    trained = [0, 1] if train_backbone else []
    assert sorted(set(stepped)) == trained
    assert [round for round, loss in enumerate(told.losses) if math.isfinite(loss)] == trained
    assert federation.accuracy.compute()[2].isfinite().all()


@pytest.mark.parametrize("most_bytes", [0, 2000, 2**20])
def test_features_of_test_samples_are_computed_once(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are kept as far as ``most_bytes`` allows. The accuracy does not depend on this limit."""
    passed, features_of = [0], analytic_head.features_of

    def counted(network: Network, model: Any, x: Tensor) -> Tensor:
        passed[0] += len(x)
        return features_of(network, model, x)

    monkeypatch.setattr(analytic_head, "features_of", counted)
    monkeypatch.setattr(repeated_tests, "MOST_BYTES", most_bytes)
    data, method = data_of(), AnalyticHead(0.3, 40)
    federation = run(method, data)
    tests = [len(task.test) for task in data.tasks]
    room = min(most_bytes // (8 * 8), sum(tests))  # 8 features in float64
    kept = sum(size for number, size in enumerate(tests) if sum(tests[: number + 1]) <= room)
    trained = sum(len(task.train) for task in data.tasks)
    assert passed[0] == trained + 3 * sum(tests) - 2 * kept
    assert (kept == 0, kept == sum(tests)) == (most_bytes == 0, most_bytes == 2**20)
    matrix = federation.accuracy.compute()
    expected = centralised(federation, data, 0.3, method._map)
    scores = features(federation, data, 0, "test", method._map) @ expected.T
    assert matrix[2, 0].item() == pytest.approx(100 * (scores.argmax(1) == labels(data, 0, "test")).mean(), abs=1e-9)


def test_domains_share_their_outputs() -> None:
    data, method = tiny_data(permuted(2)), AnalyticHead(0.3)
    federation = run(method, data)
    assert method.weight is not None
    np.testing.assert_allclose(method.weight.numpy(), centralised(federation, data, 0.3), rtol=0, atol=1e-9)


def test_what_cannot_work_is_refused() -> None:
    for others, network, federated, key in (
        ({"cfed": CFeD(source(), server_distillation=1)}, mlp, {}, "methods"),
        ({"gpm": GPM(0.9)}, mlp, {}, "methods"),
        ({"local": PersonalLayers(["layers.*"])}, mlp, {}, "methods.analytic_head"),
        ({}, norm_net, {"batchnorm": "local"}, "federated.batchnorm"),
        ({}, norm_net, {"batchnorm": "drop"}, "federated.batchnorm"),
    ):
        data = data_of()
        client = tiny_client(data, network, sgd, {"analytic_head": AnalyticHead(), **others})
        with pytest.raises(ConfigError) as refused:
            fit(client, data, federated=federated)
        assert refused.value.key == key
